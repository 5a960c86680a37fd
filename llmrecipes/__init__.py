"""Containerized LLM-training recipes on Megatron-core: one file runs on a laptop CPU, a GPU, Slurm and Kubernetes."""

__version__ = "0.1.0"
