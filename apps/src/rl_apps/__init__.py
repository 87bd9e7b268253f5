"""Thin programs that wire the rl packages into GRPO and SFT pipelines."""
