"""Supported inference servers: settings, protocol and engine of each."""
