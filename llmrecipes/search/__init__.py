"""Hyperparameter search with Optuna: a study of trials, which are jobs."""
