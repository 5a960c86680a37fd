"""MLflow: a separate process copies metrics.jsonl to it."""
