"""MLflow: a process of its own reads metrics.jsonl and passes it on."""
