"""What changes or drops documents before they become tokens."""
