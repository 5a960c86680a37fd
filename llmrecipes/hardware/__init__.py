"""What a machine or a site has: detection, cluster profiles, and their loader."""
