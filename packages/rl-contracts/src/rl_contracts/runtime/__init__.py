"""Event loops, clocks, files, logs and metrics that every package uses."""
