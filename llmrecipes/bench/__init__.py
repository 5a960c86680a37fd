"""Benchmarks of this machine: collectives, steps, reading."""
