"""Pages about runs: what they did, what they cost, what is wrong with them. HTML without scripts or network."""
