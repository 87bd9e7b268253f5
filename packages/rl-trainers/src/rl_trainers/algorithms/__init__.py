"""Algorithms: settings, credit assignment and losses."""
