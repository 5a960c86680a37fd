"""The training loop, and one rank of a run."""
