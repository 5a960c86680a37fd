"""DeepSpeed's ZeRO on megatron-core's `GPTModel`."""
