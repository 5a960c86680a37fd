"""Human-readable output of the commands."""
