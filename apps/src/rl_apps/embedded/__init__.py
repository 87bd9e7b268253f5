"""Tiny models that are built and cached locally, so that every program runs without a hub or an accelerator.

`prepare.prepare_embedded` builds the model for the generated word problems. Its short supervised warm-up teaches the
answer format, the arithmetic and the meaning of a few verbs. It deliberately does not teach the other verbs (see
`warmup`), so that reinforcement learning has something to learn. `prepare.prepare_from_scratch` builds a random model
with a tokenizer trained on given texts. `vision.prepare_vision`
builds the same for a vision-language model.
"""
