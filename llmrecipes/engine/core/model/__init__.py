"""recipe -> megatron-core HybridModel."""
