"""What goes wrong most on clusters, found before a run does."""
