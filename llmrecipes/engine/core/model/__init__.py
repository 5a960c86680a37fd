"""recipe -> megatron-core GPTModel."""
