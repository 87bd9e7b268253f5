"""Agents that call a chat API, their tools, and their conversations."""
