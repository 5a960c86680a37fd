"""The engine on megatron-core; nothing outside of this folder knows its classes."""
