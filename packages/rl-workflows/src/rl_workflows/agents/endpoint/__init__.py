"""The HTTP server that agents talk to, over any inference engine."""
