"""Reading, checking, scaling and documenting recipes."""
