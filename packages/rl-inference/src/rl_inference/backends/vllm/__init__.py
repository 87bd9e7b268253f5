"""Client side of vLLM servers."""
