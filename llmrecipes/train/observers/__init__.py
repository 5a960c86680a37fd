"""What watches a training, one module for each subject."""
