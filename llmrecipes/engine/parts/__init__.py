"""What a recipe adds to a training step, one module for each part."""
