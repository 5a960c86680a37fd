"""Everything that can be computed from a recipe before it runs. No torch, no side effects."""
