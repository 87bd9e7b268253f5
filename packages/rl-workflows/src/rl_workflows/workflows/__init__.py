"""Rollout workflows: one episode each."""
