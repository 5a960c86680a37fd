"""Hardware of a machine or a site: detection, cluster profiles, and their loader."""
