"""Weights from the trainer to the servers, and the checks that they arrived."""
