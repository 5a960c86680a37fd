"""Sinks of a run's metrics and events: metrics.jsonl, the terminal, TensorBoard, MLflow and W&B.

metrics.jsonl is the authoritative record; the others show the same numbers and may fail without stopping the training.
"""
