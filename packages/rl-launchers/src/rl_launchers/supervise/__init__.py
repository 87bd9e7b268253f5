"""Supervise a run: start, watch, restart, scale, stop."""
