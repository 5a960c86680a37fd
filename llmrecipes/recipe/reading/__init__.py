"""What reads recipes and names their keys: overrides, explanations of mistakes, names in other programs."""
