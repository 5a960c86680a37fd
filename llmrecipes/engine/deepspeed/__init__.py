"""DeepSpeed's ZeRO on the megatron-core model."""
