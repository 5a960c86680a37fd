"""From a prepared folder to the batches of a rank."""
