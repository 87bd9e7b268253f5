"""Agents that speak a chat API, their tools and conversations."""
