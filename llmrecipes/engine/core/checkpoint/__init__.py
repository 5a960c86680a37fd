"""megatron-core sharded state dicts to files and back."""
