"""Data set loaders, generated problem sets, and data loaders that resume.

`rl_datasets.validate` is a module and a command: `from rl_datasets.validate import validate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_contracts.runtime.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from rl_datasets.chat import Chat, ChatOptions
    from rl_datasets.gsm8k import GSM8K, GSM8KOptions
    from rl_datasets.hh_rlhf import HHRLHF
    from rl_datasets.loader import BatchLoader, EpochOrder, PromptLoader
    from rl_datasets.word_problems import WordProblemPairs, WordProblems

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "BatchLoader": "loader",
            "Chat": "chat",
            "ChatOptions": "chat",
            "EpochOrder": "loader",
            "GSM8K": "gsm8k",
            "GSM8KOptions": "gsm8k",
            "HHRLHF": "hh_rlhf",
            "PromptLoader": "loader",
            "WordProblemPairs": "word_problems",
            "WordProblems": "word_problems",
        },
    )


__all__ = [
    "GSM8K",
    "HHRLHF",
    "BatchLoader",
    "Chat",
    "ChatOptions",
    "EpochOrder",
    "GSM8KOptions",
    "PromptLoader",
    "WordProblemPairs",
    "WordProblems",
]
