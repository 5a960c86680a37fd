"""From sources of text to batches: `prepare` writes token files once, training only reads them."""
