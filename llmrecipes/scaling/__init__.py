"""Scaling laws of finished runs: loss against parameters and tokens."""
