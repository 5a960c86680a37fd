"""Training engines: the protocol in `base`, and a package for each implementation."""
