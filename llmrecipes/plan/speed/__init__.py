"""Time of a step, and memory by formula, from shapes and a few measured coefficients. No torch, no side effects."""
