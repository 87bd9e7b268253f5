"""Event loops, clocks, files, logs and metrics for all packages."""
