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
    from rl_datasets.vision.chat import VisionChat, VisionChatOptions
    from rl_datasets.vision.clevr_count import ClevrCount70K
    from rl_datasets.vision.drawn_scenes import DrawnScenes
    from rl_datasets.vision.geometry3k import Geometry3K
    from rl_datasets.word_problems import WordProblemPairs, WordProblems

    __version__: str
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "BatchLoader": "loader",
            "Chat": "chat",
            "ChatOptions": "chat",
            "ClevrCount70K": "vision.clevr_count",
            "DrawnScenes": "vision.drawn_scenes",
            "EpochOrder": "loader",
            "GSM8K": "gsm8k",
            "GSM8KOptions": "gsm8k",
            "Geometry3K": "vision.geometry3k",
            "HHRLHF": "hh_rlhf",
            "PromptLoader": "loader",
            "VisionChat": "vision.chat",
            "VisionChatOptions": "vision.chat",
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
    "ClevrCount70K",
    "DrawnScenes",
    "EpochOrder",
    "GSM8KOptions",
    "Geometry3K",
    "PromptLoader",
    "VisionChat",
    "VisionChatOptions",
    "WordProblemPairs",
    "WordProblems",
]
