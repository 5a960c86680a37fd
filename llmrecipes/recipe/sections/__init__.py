"""The sections of a recipe: their keys, with types, bounds and defaults."""
