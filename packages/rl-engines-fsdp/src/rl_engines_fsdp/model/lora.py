"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), implemented with the layers of `peft`.

Only the matrices A [rank, in] and B [out, rank] of each adapted layer are trained. Hugging Face directories get the
merged weight W + (alpha / rank) B A under the name of the layer. Servers get the merged weight or the matrices.
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
"""Name of the adapter in the layers of peft."""
BASE = ".base_layer"
"""Name component that peft adds to the base parameters of an adapted layer."""
HEAD = "score"
"""Name of the scalar head, which is trained without an adapter."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Adapter matrices of one layer, possibly sharded."""

    a: nn.Parameter
    """Matrix A, [rank, in]."""
    b: nn.Parameter
    """Matrix B, [out, rank]."""
    scaling: float
    """Factor of the product B A: alpha / rank."""

    def merged(self, weight: Tensor) -> Tensor:
        """Return W + scaling B A for the whole weight W [out, in] as a new tensor (collective if sharded)."""
        return adapters.merged(weight, *self.whole(), self.scaling).to(weight.dtype)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the whole A and B (collective if they are sharded)."""
        a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (self.a.detach(), self.b.detach()))
        return a, b


def peft_config(config: LoRAConfig, model_path: str, head: str) -> Any:
    """Convert the settings to a configuration of peft.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"lora requires peft, which cannot be imported: {error}. Install rl-engines-fsdp[lora], or leave lora "
            "unset."
        ) from error
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft accepts any number
        target_modules=list(config.target_modules) or "all-linear",
        lora_dropout=0.0,  # with dropout, the trained policy would differ from the sampled one
        bias="none",
        task_type="CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        base_model_name_or_path=model_path,
        inference_mode=False,
    )


def adapt(model: Any, config: LoRAConfig, head: str) -> None:
    """Add adapters to a transformers model in place, and freeze all other parameters except a scalar head.

    B is zero and A random (the initialization of peft), so the outputs of the model do not change.

    Raises:
        ConfigError: peft is not installed, or a target module matches no layer or a layer that cannot be adapted.
    """
    settings = peft_config(config, "", head)
    from peft import inject_adapter_in_model

    linear_names = sorted(
        {name.rpartition(".")[2] for name, layer in model.named_modules() if type(layer) is nn.Linear}
    )
    try:
        inject_adapter_in_model(settings, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules={config.target_modules}: {error}") from error
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        is_outside = not name.startswith(f"{model.base_model_prefix}.")
        if base is not None and (type(base) is not nn.Linear or is_outside):
            raise ConfigError(
                f"lora.target_modules={config.target_modules}: {name} is a {type(base).__name__}"
                f"{' outside of the decoder' if is_outside else ''}; only linear layers of the decoder can be adapted. "
                "Remove it from lora.target_modules."
            )
    if head != "lm":
        getattr(model, HEAD).requires_grad_(True)
    adapted = [name for name, _ in _adapted(model)]
    unmatched = [target for target in config.target_modules if not any(f".{n}".endswith(f".{target}") for n in adapted)]
    if unmatched:
        raise ConfigError(
            f"lora.target_modules: expected names of linear layers ({', '.join(linear_names)}), found "
            f"{', '.join(unmatched)}, which match no layer. Correct or remove them."
        )
    names = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    log.info("lora: adapted %d layers (%s) with %d trained parameters", len(adapted), names, num_trained)


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name belongs to an adapter (peft: `.lora_A.`, `.lora_B.`)."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the Hugging Face name of a parameter that is not part of an adapter."""
    return name.replace(BASE, "")


def pairs(model: nn.Module, prefix: str) -> dict[str, Pair]:
    """Return the adapters by the Hugging Face names of the weights that they adapt.

    Args:
        prefix: prefix of the module names that the Hugging Face names do not have.
    """
    return {
        f"{name.removeprefix(prefix)}.weight": Pair(
            module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight, module.scaling[ADAPTER]
        )
        for name, module in _adapted(model)
    }


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Disable all adapters within the context, as if they were zero."""
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
