"""Algorithms, actors, training loops, save and recover."""
