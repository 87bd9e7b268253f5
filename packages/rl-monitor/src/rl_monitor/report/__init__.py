"""Report page of a run that needs no network: curves, settings, events, and completions token by token."""
