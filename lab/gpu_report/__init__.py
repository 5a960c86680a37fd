"""One GPU measured against a CPU's results, the plan, and other training loops."""
