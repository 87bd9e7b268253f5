"""Data set loaders and generated problem sets."""
