"""Trains what a study lacks: pilots and runs, here or as SLURM jobs."""
