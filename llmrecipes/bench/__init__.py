"""Measurements of this machine: collectives, steps, reading."""
