"""Scheduler for Slurm."""
