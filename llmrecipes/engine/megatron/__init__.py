"""The engine based on megatron-core: its optimizer and pipeline schedules on the model of `core`."""
