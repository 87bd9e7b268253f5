"""Kinds of servers: settings, protocol and engine of each."""
