"""The agreed language of the rl packages: contracts, data structures, shared kernel."""
