"""Settings of the commands, and composition of a command line into a checked config."""
