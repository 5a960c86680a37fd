"""What the engines on megatron-core's model share: devices, process groups, model, checkpoint files, evaluation."""
