"""Chat messages to token ids, and back to turns."""
