"""Where a run's numbers go: metrics.jsonl, the terminal, TensorBoard and MLflow.

metrics.jsonl is the record; everything else shows the same numbers and may fail without stopping the training.
"""
