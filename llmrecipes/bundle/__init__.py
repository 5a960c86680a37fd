"""A run in one file, and training it again somewhere else."""
