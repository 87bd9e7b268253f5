"""Programs of the commands, one per file."""
