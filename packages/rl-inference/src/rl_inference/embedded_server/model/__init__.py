"""The model of the embedded server: attention, KV cache, pages, memory."""
