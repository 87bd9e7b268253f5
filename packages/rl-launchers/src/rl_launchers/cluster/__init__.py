"""Scheduler of workers on several machines, with a node agent on each."""
