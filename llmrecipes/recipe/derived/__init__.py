"""What follows from a recipe alone: sizes, degrees, stages, and which weights are trained."""
