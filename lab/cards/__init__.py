"""Recipe cards: what was planned, searched, dry run, verified, rehearsed and run of each recipe."""
