"""HTTP server that agents call, for any inference engine."""
