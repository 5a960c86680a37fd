"""What the commands do: each puts the packages below it in order."""
