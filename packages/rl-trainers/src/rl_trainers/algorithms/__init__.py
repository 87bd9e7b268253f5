"""Algorithms: settings, credit assignment, losses."""
