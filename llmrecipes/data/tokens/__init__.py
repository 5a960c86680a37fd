"""From text, conversations and pairs to token ids."""
