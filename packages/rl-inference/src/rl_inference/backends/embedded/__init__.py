"""Client side of the embedded server."""
