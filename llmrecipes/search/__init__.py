"""Hyperparameter search with Optuna: a study of trials, each of which is a job of its own."""
