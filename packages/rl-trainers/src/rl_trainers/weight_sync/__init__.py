"""Publish weights from the trainer to the servers and verify that they arrived."""
