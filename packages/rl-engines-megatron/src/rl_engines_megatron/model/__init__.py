"""Model: from a Hugging Face config to the model chunks of a rank."""
