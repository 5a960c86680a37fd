"""Checkpoints: durable directories that are either complete or do not exist.

`manifest` and `store` are plain filesystem code without torch; `saver` writes an engine's state.
"""
