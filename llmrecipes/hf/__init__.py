"""Models in the form of Hugging Face transformers: names and shapes of weights, configuration, files."""
