"""Trains what a study lacks: pilots, rungs and runs, here or as SLURM jobs."""
