"""Data sets of images with questions."""
