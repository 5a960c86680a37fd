"""What goes with what in a recipe: rules across its sections."""
