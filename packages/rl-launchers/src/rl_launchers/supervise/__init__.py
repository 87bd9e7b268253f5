"""Supervision of a run: start, monitor, restart, scale and stop its processes."""
