"""The training loop and its engine."""
