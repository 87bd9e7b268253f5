"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), by the layers of `peft`.

Only the matrices A [rank, in] and B [out, rank] of each adapted layer learn. What leaves the engine for Hugging Face
directories is the merged weight W + (alpha / rank) B A under the layer's own name; servers get that, or the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_contracts.errors import ConfigError
from rl_contracts.runtime.logging import get_logger
from rl_contracts.weights import adapters
from rl_engines_fsdp.config import LoRAConfig

log = get_logger("engines.fsdp")

ADAPTER = "default"
"""Name of the adapter inside peft's layers."""
BASE = ".base_layer"
"""What peft puts into the names of the parameters of an adapted layer."""
HEAD = "score"
"""The scalar head, which is trained whole."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrices of one adapted layer, which may be sharded."""

    a: nn.Parameter
    """[rank, in]."""
    b: nn.Parameter
    """[out, rank]."""
    scaling: float
    """alpha / rank."""

    def merged(self, weight: Tensor) -> Tensor:
        """W + scaling B A of the whole weight W [out, in], a new tensor (collective where the matrices are sharded)."""
        return adapters.merged(weight, *self.whole(), self.scaling).to(weight.dtype)

    def whole(self) -> tuple[Tensor, Tensor]:
        """A and B (collective where they are sharded)."""
        a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (self.a.detach(), self.b.detach()))
        return a, b


def peft_config(config: LoRAConfig, model_path: str, head: str) -> Any:
    """What peft calls the same settings.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"lora: expected peft to be installed, found: {error}. Install rl-engines-fsdp[lora], or leave lora unset."
        ) from error
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        target_modules=list(config.target_modules) or "all-linear",
        lora_dropout=0.0,  # with it the policy that is trained is not the one that was sampled
        bias="none",
        task_type="CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        base_model_name_or_path=model_path,
        inference_mode=False,
    )


def adapt(model: Any, config: LoRAConfig, head: str) -> None:
    """Put adapters into a transformers model, in place; everything but them and a scalar head is frozen.

    B is zero and A random (peft's initialisation), so the model computes what it did before.

    Raises:
        ConfigError: peft is not installed, or a name is that of no layer or of one that cannot be adapted.
    """
    settings = peft_config(config, "", head)
    from peft import inject_adapter_in_model

    known = sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if type(layer) is nn.Linear})
    try:
        inject_adapter_in_model(settings, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules {config.target_modules}: {error}") from error
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        outside = not name.startswith(f"{model.base_model_prefix}.")
        if base is not None and (type(base) is not nn.Linear or outside):
            raise ConfigError(
                f"lora.target_modules {config.target_modules}: {name} is a {type(base).__name__}"
                f"{' outside of the decoder' if outside else ''}; only linear layers of the decoder can be adapted."
            )
    if head != "lm":
        getattr(model, HEAD).requires_grad_(True)
    adapted = [name for name, _ in _adapted(model)]
    idle = [wanted for wanted in config.target_modules if not any(f".{n}".endswith(f".{wanted}") for n in adapted)]
    if idle:
        raise ConfigError(
            f"lora.target_modules: expected names of linear layers ({', '.join(known)}), found {', '.join(idle)}, "
            "which match none. Correct them, or leave them out."
        )
    names = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    log.info("lora: %d layers are adapted (%s), with %d parameters that learn", len(adapted), names, learning)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter (peft: `.lora_A.`, `.lora_B.`)."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The Hugging Face name of a parameter that is not an adapter's."""
    return name.replace(BASE, "")


def pairs(model: nn.Module, prefix: str) -> dict[str, Pair]:
    """The adapters by the Hugging Face names of the weights that they adapt.

    Args:
        prefix: what modules' names begin with and the Hugging Face names do not.
    """
    return {
        f"{name.removeprefix(prefix)}.weight": Pair(
            module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight, module.scaling[ADAPTER]
        )
        for name, module in _adapted(model)
    }


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """For the time of a block, the model computes as if all adapters were zero."""
    layers = [(module, module.scaling[ADAPTER]) for _, module in _adapted(model)]
    try:
        for module, _ in layers:
            module.scaling[ADAPTER] = 0.0
        yield
    finally:
        for module, scale in layers:
            module.scaling[ADAPTER] = scale


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    named = model.named_modules()
    return ((name, module) for name, module in named if hasattr(module, "base_layer") and hasattr(module, "lora_A"))
