"""What looks wrong in a run: rules over the records of metrics.jsonl, live and after the fact."""
