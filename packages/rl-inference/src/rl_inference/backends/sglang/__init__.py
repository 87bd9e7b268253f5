"""Client side of SGLang servers."""
