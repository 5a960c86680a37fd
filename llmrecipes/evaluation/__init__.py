"""Evaluation of a model: perplexity, lm-evaluation-harness tasks, and checks of the text that it writes."""
