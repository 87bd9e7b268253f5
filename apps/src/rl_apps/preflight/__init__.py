"""Preflight: checks of a run before any process starts."""
