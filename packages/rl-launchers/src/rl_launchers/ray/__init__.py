"""Scheduler for Ray clusters."""
