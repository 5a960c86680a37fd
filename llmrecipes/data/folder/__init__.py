"""A prepared folder: its manifest, checks, documents, and what people look at in it."""
