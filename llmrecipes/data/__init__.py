"""From text sources to batches: `prepare` writes token files once, training only reads them."""
