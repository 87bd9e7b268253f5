"""What a run was, on one page that needs no network: curves, settings, events, and its answers token by token."""
