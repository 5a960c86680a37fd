"""Parts of a training step: what a recipe adds to it, each in a module of its own."""
