"""What the commands do: each module orchestrates the packages below it."""
