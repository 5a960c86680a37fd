"""Tools that prove what the product claims; they are in a checkout only, not in the wheel."""
