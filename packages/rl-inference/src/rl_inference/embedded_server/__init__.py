"""Embedded inference server: `python -m rl_inference.embedded_server --model DIR --port N`.

The server has two threads. The main thread serves HTTP (`app`). The decode thread (`loop`) owns the model, its KV
cache and its weights, and touches them only between two forward passes. The threads exchange only `GenerationJob`s
and commands.
"""
