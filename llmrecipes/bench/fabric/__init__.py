"""Bandwidth and latency between the adapters of a job's nodes, measured with perftest."""
