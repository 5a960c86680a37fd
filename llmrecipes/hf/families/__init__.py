"""One table for each family of models."""
