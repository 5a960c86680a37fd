"""Checkpoints: durable directories that either exist whole or not at all.

`manifest` and `store` are plain filesystem code without torch; `saver` and `loader` carry megatron-core state in
and out.
"""
