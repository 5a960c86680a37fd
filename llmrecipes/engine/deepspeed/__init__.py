"""The engine with DeepSpeed's ZeRO on the model of `core`."""
