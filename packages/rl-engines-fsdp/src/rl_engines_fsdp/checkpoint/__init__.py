"""Saving and loading: Hugging Face directories, adapters, and states to resume training from."""
