"""What is saved and loaded: Hugging Face directories, adapters, and states that training continues from."""
