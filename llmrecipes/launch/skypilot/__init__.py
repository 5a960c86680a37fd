"""Runs as tasks of SkyPilot."""
