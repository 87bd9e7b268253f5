"""The `rl` command and the tools around runs."""
