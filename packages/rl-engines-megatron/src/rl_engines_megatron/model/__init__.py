"""The model: from a Hugging Face config to this rank's parts."""
