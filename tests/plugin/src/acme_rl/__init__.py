"""Sample third-party plugin: a component of every kind, written against the contracts only."""
