"""Rollout workflows and the asynchronous runtime that executes them."""
