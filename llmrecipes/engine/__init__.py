"""What trains: the protocol in `base`, and a folder for each implementation."""
