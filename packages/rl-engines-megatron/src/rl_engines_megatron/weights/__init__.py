"""Conversion of weights between Hugging Face names and megatron-core's layout."""
