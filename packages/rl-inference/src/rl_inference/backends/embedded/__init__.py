"""The embedded server as its client sees it."""
