"""Recipes made of another one: scaled down, wider, grown, pruned, or with experts."""
