"""Inference clients (SGLang, vLLM, embedded) and the embedded server."""
