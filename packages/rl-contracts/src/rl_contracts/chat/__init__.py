"""Convert chat messages to token ids, and completions back to messages."""
