"""Checkpoints that Megatron-LM's training writes with `--ckpt-format torch_dist`: untrusted, and read as data."""
