"""The engine based on megatron-core; its classes are not used outside of this package."""
