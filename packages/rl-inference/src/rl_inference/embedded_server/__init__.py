"""The embedded server: `python -m rl_inference.embedded_server --model DIR --port N`.

Two threads. The main thread speaks HTTP (`app`); the decode thread (`loop`) owns the model, its cache and its
weights, and touches them only between two forward passes. They exchange `GenerationJob`s and commands,
nothing else."""
