"""Tiny models made on the spot and cached, so that every program runs with no hub and no accelerator.

`prepare_embedded` makes the model of the generated word problems. Its short supervised warm-up teaches the form of the
answers, the arithmetic and the meaning of a few verbs, and deliberately not the meaning of the others (see `lessons`):
that is left for the reward. `prepare_from_scratch` makes a random model with a tokenizer trained on given texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.lazy import on_demand

if TYPE_CHECKING:
    from rl_apps.embedded.lessons import TAUGHT_VERBS
    from rl_apps.embedded.prepare import prepare_embedded, prepare_from_scratch

__all__ = ["TAUGHT_VERBS", "prepare_embedded", "prepare_from_scratch"]

# imported when asked for: making a model brings in torch and transformers
__getattr__ = on_demand(
    __name__, {"TAUGHT_VERBS": "lessons", "prepare_embedded": "prepare", "prepare_from_scratch": "prepare"}
)
