"""Weights & Biases: a separate process copies metrics.jsonl to it."""
