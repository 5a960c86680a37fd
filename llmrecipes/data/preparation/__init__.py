"""How a folder is written: shards, compared, counted, placed and collected by an executor."""
