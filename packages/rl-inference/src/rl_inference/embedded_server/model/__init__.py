"""Model of the embedded server: attention, KV cache, pages and memory."""
