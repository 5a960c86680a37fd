"""What a run does when something outside its recipe goes wrong: signals, non-finite numbers, lack of memory."""
