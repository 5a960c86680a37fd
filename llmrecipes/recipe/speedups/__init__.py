"""What the features of `speed` need of a recipe and of a machine, and which ones a run uses."""
