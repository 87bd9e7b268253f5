"""What a model says of each token: log-probs of a vocabulary (`lm`), a critic's value, or a reward model's score."""

from __future__ import annotations

from typing import Any

from torch import nn

from rl_contracts.errors import ModelError
from rl_contracts.logging import get_logger
from rl_engines_fsdp.model import scalar_head

log = get_logger("engines.fsdp")


def factory(head: str) -> Any:
    """The class of transformers that makes models with this head."""
    import transformers

    return transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification


def fit_config(path: str, config: Any, head: str) -> None:
    """See that what a directory holds has the head, or one that may be replaced, and set the number of labels.

    Raises:
        ModelError: a language model is asked for and the directory holds a classifier; or a scalar head, and the
            directory holds a classifier of several labels.
    """
    classifier = is_classifier(config)
    if head == "lm" and classifier:
        raise ModelError(
            f"model {path}: expected a causal language model, found a {config.architectures[0]}, which has a scalar "
            "head instead of a vocabulary. Set head=value or head=score, or give the language model's directory."
        )
    if head != "lm":
        if classifier and config.num_labels != 1:
            raise ModelError(
                f"model {path}: expected a classifier of 1 label for head={head}, found {config.num_labels} labels."
            )
        config.num_labels = 1


def without_settled(path: str, model: nn.Module, missing: list[str], head: str, may_be_new: bool) -> list[str]:
    """Give a freshly loaded model a new head where its directory, a language model's, has none.

    Args:
        missing: parameters without weights in the directory.
        may_be_new: whether a new head is what the caller wants; where a trained model is loaded it is not.

    Returns:
        the parameters that are still without weights.
    """
    if head == "lm" or missing != [scalar_head.NAME] or not may_be_new:
        return missing
    scalar_head.make_new_head(model)
    log.info("model %s has no scalar head; it starts at zero.", path)
    return []


def is_classifier(config: Any) -> bool:
    """Whether a configuration comes from the directory of a sequence classifier."""
    return bool(config.architectures) and str(config.architectures[0]).endswith("ForSequenceClassification")
