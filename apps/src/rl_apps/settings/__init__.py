"""Settings: what they are, and how a command line becomes a checked config."""
