"""Runs one rank of a world of any size on tensors without data, and reports what it would hold, send and wait for."""
