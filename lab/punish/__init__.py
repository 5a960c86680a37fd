"""Faults of every kind against a real run on this machine, to see that it notices them and recovers."""
