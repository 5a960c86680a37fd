"""What sites have: machines, links and schedulers, one YAML file each."""
