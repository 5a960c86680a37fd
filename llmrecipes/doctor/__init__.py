"""Checks for the most common faults of clusters, before a run."""
