"""Rollout workflows, each of which defines one episode."""
