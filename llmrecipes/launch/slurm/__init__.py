"""Runs as Slurm jobs: `command` renders sbatch's command line, `launcher` submits it and watches the job."""
