"""Garbage collection in a process that holds many episodes."""

from __future__ import annotations

import gc

THRESHOLDS = (1_000_000, 20, 50)
"""Of `gc.set_threshold`. A young collection is due when a million more objects were made than freed, about 50,000
episodes. Finished episodes that are replaced by new ones add few: in a steady run of 100,000 outstanding ones there was
one collection per 120,000 episodes."""


def tune_garbage_collection() -> None:
    """Keep Python's cycle collector from walking over all outstanding episodes again and again.

    An outstanding episode is about twenty tracked objects (coroutines, a task, requests), which survive the young
    collections and are then visited by each full one. With 100,000 of them and Python's own thresholds, that nearly
    doubles the processor time of an episode; a young collection per 100,000 new objects still takes a quarter of it.
    The runtime makes no cycles (a test sees to it), so reference counts free all that it uses; what workflows and
    libraries leave in cycles is still found, only later. What exists at the call, mostly modules, is never looked at
    again.

    This is a setting of the whole process. So its owner calls this, once, after its imports and before the first
    episode; the runtime itself does not.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
