"""Tiny models made on the spot and cached, so that every program runs with no hub and no accelerator.

`prepare.prepare_embedded` makes the model of the generated word problems. Its short supervised warm-up teaches the form
of the answers, the arithmetic and the meaning of a few verbs, and deliberately not the meaning of the others (see
`warmup`): that is left for the reward. `prepare.prepare_from_scratch` makes a random model with a tokenizer trained on
given texts.
"""
