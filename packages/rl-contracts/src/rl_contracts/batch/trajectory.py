"""Trajectory batch: the definition of its keys, and all code that builds, validates, splits, pads and packs it.

An episode yields `Trajectory` objects (numpy, unpadded). `stack` builds the batch from them, a `TensorDict` of batch
size [B]. Its per-token entries [B, T] are aligned with `input_ids`: entry t describes token t. Engines use the packed
form, `PackedBatch`: the real tokens of all sequences end to end, so that padding never reaches attention or a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from rl_contracts.batch import image_entries
from rl_contracts.batch.image_entries import IMAGES_KEY, images_of, set_images
from rl_contracts.batch.packing import unit_indices
from rl_contracts.errors import DataError
from rl_contracts.reward import components_of

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.batch.image_entries import ImageRows
    from rl_contracts.data import ModelResponse
    from rl_contracts.images import Image

__all__ = [
    "COMPONENT_PREFIX",
    "SEQUENCE_KEYS",
    "TOKEN_KEYS",
    "UNIT_KEY",
    "PackedBatch",
    "Trajectory",
    "batch_from_tensors",
    "batch_to_tensors",
    "concatenate",
    "empty",
    "from_response",
    "is_token_entry",
    "lengths",
    "load_batch",
    "pack",
    "pad_to",
    "save_batch",
    "select",
    "stack",
    "trim",
    "units",
    "unpack",
    "validate",
]

TOKEN_KEYS: dict[str, str] = {
    "input_ids": "int64",
    "attention_mask": "bool",
    "loss_mask": "bool",
    "logprobs": "float32",
    "versions": "int32",
}
"""Per-token entries of a batch, [B, T], and their dtypes."""

SEQUENCE_KEYS: dict[str, str] = {
    "rewards": "float32",
    "prompt_ids": "int64",
    "group_ids": "int64",
    "episode_ids": "int64",
    "temperature": "float32",
    "truncated": "bool",
}
"""Per-sequence entries of a batch, [B], and their dtypes."""

COMPONENT_PREFIX = "reward_components/"
"""Prefix of the names of float32 [B] entries with the components of `rewards`, if all sequences have components."""

UNIT_KEY = "unit_ids"
"""Optional entry int64 [B] that keeps sequences together.

Sequences of one unit, such as the two completions of a preference pair, are in the same micro-batch, so that a loss can
compare them.
"""


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sequence before padding: numpy arrays of length T."""

    input_ids: np.ndarray
    """Prompt and generated tokens, int64 [T]."""
    loss_mask: np.ndarray
    """Mask of the tokens to train on, bool [T]."""
    logprobs: np.ndarray
    """Log-probs of the behavior policy, as sampled, float32 [T]; 0 where not generated."""
    versions: np.ndarray
    """Weight version that generated each token, int32 [T]; -1 where not generated."""
    reward: float = 0.0
    """Reward of the episode, the same for all of its sequences."""
    temperature: float = 1.0
    """Sampling temperature; 1 for greedy completions, whose log-probs are computed from the unscaled logits."""
    truncated: bool = False
    """True if the length limit ended the completion, not the model."""
    token_rewards: np.ndarray | None = None
    """Rewards per token, float32 [T], if the workflow assigns rewards per turn."""
    prompt_id: int = -1
    """Index of the prompt in the data set; set by the rollout runtime."""
    group_id: int = -1
    """Number of the group, one per admission of a prompt; set by the rollout runtime."""
    episode_id: int = -1
    """Number of the sample in its group; set by the rollout runtime."""
    images: tuple[Image, ...] = ()
    """Images of the sequence, in the order of their placeholders in `input_ids`."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values for display (prompt text, completion text, gold answer); not part of the batch."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """The summands of `reward`, if the reward function returns an `rl_contracts.reward.CompositeReward`."""

    def __len__(self) -> int:
        return len(self.input_ids)


def from_response(
    response: ModelResponse, *, reward: float, temperature: float, info: dict[str, Any] | None = None
) -> Trajectory:
    """Return the trajectory of a single-turn completion, with all generated tokens in the loss mask.

    Raises:
        DataError: the response has no generated token, or its lists differ in length.
    """
    prompt, generated = len(response.input_ids), len(response.output_ids)
    if not (generated == len(response.logprobs) == len(response.versions)):
        raise DataError(
            f"response of {response.server or 'a server'}: {generated} tokens, {len(response.logprobs)} "
            f"log-probs, {len(response.versions)} versions; expected one log-prob and one version per token."
        )
    if not generated:
        raise DataError(
            "the response has no generated token, so there is nothing to train on. "
            "Check max_new_tokens and the length of the prompt."
        )
    total = prompt + generated
    logprobs = np.zeros(total, dtype=np.float32)
    loss_mask = np.zeros(total, dtype=bool)
    versions = np.empty(total, dtype=np.int32)  # `np.full` takes twice as long, and this runs for each completion
    versions[:prompt] = -1
    first = response.versions[0]
    versions[prompt:] = first if response.versions.count(first) == generated else response.versions
    logprobs[prompt:], loss_mask[prompt:] = response.logprobs, True
    return Trajectory(
        input_ids=np.asarray([*response.input_ids, *response.output_ids], dtype=np.int64),
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        reward=float(reward),
        reward_components=components_of(reward),
        temperature=temperature if temperature > 0 else 1.0,
        truncated=response.stop_reason == "length",
        info=info or {},
    )


def stack(rows: Sequence[Trajectory]) -> TensorDict:
    """Right-pad trajectories to the longest and stack them into a batch of size [len(rows)] that passes `validate`.

    Raises:
        DataError: the trajectories have different reward components.
    """
    from tensordict import TensorDict

    if not rows:
        return empty()
    lengths = np.array([len(trajectory.input_ids) for trajectory in rows], dtype=np.int64)
    shape = (len(rows), int(lengths.max()))
    mask = np.arange(shape[1]) < lengths[:, None]

    def padded(name: str, fill: float, dtype: Any) -> torch.Tensor:
        entries = [getattr(trajectory, name) for trajectory in rows]
        padded_rows = np.full(shape, fill, dtype=dtype)
        padded_rows[mask] = np.concatenate(
            [
                np.zeros(len(trajectory)) if values is None else values
                for trajectory, values in zip(rows, entries, strict=True)
            ]
        )
        return torch.from_numpy(padded_rows)

    def column(name: str, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.array([getattr(trajectory, name) for trajectory in rows], dtype=dtype))

    batch = {
        "input_ids": padded("input_ids", 0, np.int64),
        "attention_mask": torch.from_numpy(mask),
        "loss_mask": padded("loss_mask", 0, np.bool_),
        "logprobs": padded("logprobs", 0, np.float32),
        "versions": padded("versions", -1, np.int32),
        "rewards": column("reward", np.float32),
        "prompt_ids": column("prompt_id", np.int64),
        "group_ids": column("group_id", np.int64),
        "episode_ids": column("episode_id", np.int64),
        "temperature": column("temperature", np.float32),
        "truncated": column("truncated", np.bool_),
    }
    if any(trajectory.token_rewards is not None for trajectory in rows):
        batch["token_rewards"] = padded("token_rewards", 0, np.float32)
    for name in rows[0].reward_components:
        if any(trajectory.reward_components.keys() != rows[0].reward_components.keys() for trajectory in rows):
            names = sorted({component for trajectory in rows for component in trajectory.reward_components})
            raise DataError(
                f"reward components differ between sequences of a batch (all names: {names}). Return the same "
                "components for all completions."
            )
        batch[COMPONENT_PREFIX + name] = torch.tensor([trajectory.reward_components[name] for trajectory in rows])
    result = TensorDict(batch, batch_size=[len(rows)])
    set_images(result, [trajectory.images for trajectory in rows])
    return result


def empty(width: int = 1) -> TensorDict:
    """Return a batch without sequences but with all keys, [0] and [0, width], for a rank that received none."""
    from tensordict import TensorDict

    tokens = {k: torch.zeros(0, width, dtype=getattr(torch, d)) for k, d in TOKEN_KEYS.items()}
    sequences = {k: torch.zeros(0, dtype=getattr(torch, d)) for k, d in SEQUENCE_KEYS.items()}
    return TensorDict({**tokens, **sequences}, batch_size=[0])


def lengths(batch: TensorDict) -> torch.Tensor:
    """Return the number of real tokens of each sequence, int64 [B]."""
    return batch["attention_mask"].sum(-1)


def units(batch: TensorDict) -> list[list[int]]:
    """Return the sequence indices of each unit: sequences that must stay in one micro-batch (`UNIT_KEY`).

    Without the entry `unit_ids`, each sequence is a unit.
    """
    return unit_indices(batch[UNIT_KEY].tolist() if UNIT_KEY in batch else range(batch.batch_size[0]))


def validate(batch: TensorDict, generated: bool = True) -> None:
    """Validate a batch once, before training.

    Args:
        batch: the batch.
        generated: whether a model sampled the trained tokens, so that each must have a version.

    Raises:
        DataError: a key is missing or has the wrong dtype or shape; padding is not on the right; a sequence is empty;
            a trained token has no version or is padding; a temperature is not positive; a number is not finite.
    """
    size = batch["input_ids"].shape if "input_ids" in batch else torch.Size([])
    sequence_keys = SEQUENCE_KEYS | ({UNIT_KEY: "int64"} if UNIT_KEY in batch else {})
    for names, shape in ((TOKEN_KEYS, size), (sequence_keys, size[:1])):
        for name, dtype in names.items():
            if name not in batch:
                raise DataError(f"batch: key {name!r} is missing; the batch has {sorted(map(str, batch.keys()))}.")
            value = batch[name]
            if value.dtype != getattr(torch, dtype) or value.shape != shape:
                actual = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                raise DataError(f"batch[{name!r}]: expected {dtype} {list(shape)}, found {actual}.")
    mask, loss_mask = batch["attention_mask"], batch["loss_mask"]
    temperature = batch["temperature"]
    problems = {
        "is empty: attention_mask is False everywhere": ~mask.any(-1),
        "is not right-padded: a token follows padding": (mask[:, 1:] & ~mask[:, :-1]).any(-1),
        "has loss_mask set on padding": (loss_mask & ~mask).any(-1),
        "trains on a token without a version (versions is -1)": (loss_mask & (batch["versions"] < 0)).any(-1)
        & generated,
        "has a temperature that is not positive and finite": ~((temperature > 0) & torch.isfinite(temperature)),
        "has log-probs that are not finite": ~torch.isfinite(batch["logprobs"]).all(-1),
        "has a reward that is not finite": ~torch.isfinite(batch["rewards"]),
    }
    for problem, is_bad in problems.items():
        if is_bad.any():
            index = int(is_bad.nonzero()[0, 0])
            prompt, group = int(batch["prompt_ids"][index]), int(batch["group_ids"][index])
            raise DataError(
                f"batch: sequence {index} (prompt {prompt}, group {group}) {problem}; "
                f"number of such sequences: {int(is_bad.sum())}."
            )


def select(batch: TensorDict, rows: Sequence[int] | torch.Tensor) -> TensorDict:
    """Return the sequences with the given indices, in this order, trimmed to the longest; batch size [len(rows)]."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    return trim(batch[index]) if len(index) else batch[:0]


def trim(batch: TensorDict) -> TensorDict:
    """Remove the padding beyond the longest sequence."""
    from tensordict import TensorDict

    width = batch["attention_mask"].shape[1]
    longest = max(int(lengths(batch).max()) if batch.batch_size[0] else 1, 1)
    if longest == width:
        return batch
    trimmed = {k: v[:, :longest] if is_token_entry(v, width) else v for k, v in batch.items()}
    return TensorDict(trimmed, batch_size=batch.batch_size)


def concatenate(batches: Sequence[TensorDict]) -> TensorDict:
    """Concatenate batches with the same keys, padded to the longest sequence. Only some may have images.

    Raises:
        DataError: `batches` is empty, or the keys differ.
    """
    from tensordict import TensorDict

    if not batches:
        raise DataError("concatenate: expected at least one batch, found none.")
    images = [row for batch in batches for row in images_of(batch)]
    batches = [batch.exclude(IMAGES_KEY) for batch in batches]
    keys = set(batches[0].keys())
    for batch in batches[1:]:
        if set(batch.keys()) != keys:
            raise DataError(f"concatenate: batches differ in keys: {sorted(map(str, keys ^ set(batch.keys())))}.")
    width = max(b["input_ids"].shape[1] for b in batches)
    padded = [pad_to(b, width) for b in batches]
    result = TensorDict(
        {k: torch.cat([b.get(k) for b in padded]) for k, _ in padded[0].items()},
        batch_size=[sum(b.batch_size[0] for b in batches)],
    )
    set_images(result, images)
    return result


def pad_to(batch: TensorDict, width: int) -> TensorDict:
    """Right-pad the per-token entries to [B, width]: versions with -1, all other entries with 0."""
    from tensordict import TensorDict

    old = batch["input_ids"].shape[1]
    if old == width:
        return batch
    if old > width:
        raise DataError(f"pad_to: the batch has width {old}, which is more than {width}; trim it first.")
    entries: dict[str, Any] = {str(k): v for k, v in batch.items()}
    padded = {
        k: pad(v, (0, 0) * (v.ndim - 2) + (0, width - old), value=-1 if k == "versions" else 0)
        for k, v in entries.items()
        if is_token_entry(v, old)
    }
    return TensorDict(entries | padded, batch_size=batch.batch_size)


def is_token_entry(value: Any, width: int) -> bool:
    """Return whether an entry of a batch is per token ([B, T, ...]) and not per sequence ([B])."""
    return getattr(value, "ndim", 0) >= 2 and value.shape[1] == width


@dataclass(slots=True)
class PackedBatch:
    """The N real tokens of S sequences, end to end.

    `packed[name]` returns a per-token entry [N] or a per-sequence entry [S].
    """

    cu_seqlens: torch.Tensor
    """Start offset of each sequence, then N, int32 [S + 1]."""
    max_seqlen: int
    """Length of the longest sequence."""
    position_ids: torch.Tensor
    """Position of each token in its sequence, int64 [N]."""
    sequence_of_token: torch.Tensor
    """Sequence index of each token, 0 to S - 1, int64 [N]."""
    tokens: dict[str, torch.Tensor]
    """Per-token entries, [N]."""
    sequences: dict[str, torch.Tensor]
    """Per-sequence entries, [S]. The optional `unit_ids` are renumbered from 0."""
    num_units: int
    """Number of units U; equal to S if the batch has no `unit_ids`."""
    images: ImageRows = ()
    """Images of each sequence, [S]; empty if no sequence has images."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            names = sorted([*self.tokens, *self.sequences])
            raise DataError(f"packed batch: no entry {name!r}; it has {names}. Run the stage that computes it first.")
        return self.tokens[name] if name in self.tokens else self.sequences[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    @property
    def num_tokens(self) -> int:
        """Number of tokens N."""
        return int(self.position_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        """Number of sequences S."""
        return int(self.cu_seqlens.shape[0]) - 1

    def per_token(self, name: str) -> torch.Tensor:
        """Return a per-sequence entry, repeated for each token of the sequence, [N]."""
        return self.sequences[name][self.sequence_of_token]

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of per-token values [N] in each sequence, [S]; differentiable."""
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence_of_token, values)

    def unit_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of per-sequence values [S] in each unit, [U]; differentiable."""
        if UNIT_KEY not in self.sequences:
            return values
        return values.new_zeros(self.num_units).index_add(0, self.sequences[UNIT_KEY], values)

    def last_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of the last token of each sequence, [S], from per-token values [N]; differentiable."""
        return values[self.cu_seqlens[1:].long() - 1]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy the batch to another device without waiting for the copy."""

        def move(value: torch.Tensor) -> torch.Tensor:
            return value.to(device, non_blocking=True)

        return PackedBatch(
            move(self.cu_seqlens),
            self.max_seqlen,
            move(self.position_ids),
            move(self.sequence_of_token),
            {k: move(v) for k, v in self.tokens.items()},
            {k: move(v) for k, v in self.sequences.items()},
            self.num_units,
            self.images,
        )


def pack(batch: TensorDict) -> PackedBatch:
    """Pack the sequences of a CPU batch end to end."""
    mask = batch["attention_mask"]
    width, sizes = mask.shape[1], mask.sum(-1)
    cu_seqlens = torch.zeros(len(sizes) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=cu_seqlens[1:])
    tensors: dict[str, torch.Tensor] = {
        str(k): v for k, v in batch.items() if isinstance(v, torch.Tensor) and k != "attention_mask"
    }
    num_units, images = len(sizes), images_of(batch)
    if UNIT_KEY in tensors:
        unit_ids, tensors[UNIT_KEY] = torch.unique(tensors[UNIT_KEY], return_inverse=True)
        num_units = len(unit_ids)
    return PackedBatch(
        cu_seqlens=cu_seqlens,
        max_seqlen=int(sizes.max()) if len(sizes) else 0,
        position_ids=torch.arange(width).expand_as(mask)[mask],
        sequence_of_token=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        tokens={k: v[mask] for k, v in tensors.items() if is_token_entry(v, width)},
        sequences={k: v for k, v in tensors.items() if not is_token_entry(v, width)},
        num_units=num_units,
        images=images if any(images) else (),
    )


def unpack(values: torch.Tensor, batch: TensorDict) -> torch.Tensor:
    """Return a packed per-token entry [N] in the padded shape [B, T] of `batch`, with 0 at padding.

    This is the inverse of `pack` for one entry.
    """
    mask = batch["attention_mask"]
    out = values.new_zeros(mask.shape)
    out[mask] = values
    return out


def batch_to_tensors(batch: TensorDict) -> dict[str, torch.Tensor]:
    """Return all entries of a batch as tensors. Each image is stored once; `batch_from_tensors` is the inverse.

    Raises:
        DataError: the batch has entries other than images that are not tensors.
    """
    entries: dict[str, Any] = {str(k): v for k, v in batch.items() if k != IMAGES_KEY}
    others = [name for name, value in entries.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise DataError(f"batch: entries {others} are not tensors and cannot be saved; drop them first.")
    return entries | (image_entries.to_tensors(images_of(batch)) if IMAGES_KEY in batch else {})


def batch_from_tensors(tensors: dict[str, torch.Tensor]) -> TensorDict:
    """Build a batch from the result of `batch_to_tensors`, without validation.

    Raises:
        DataError: the entries have different sizes.
    """
    from tensordict import TensorDict

    entries = {name: value for name, value in tensors.items() if name not in image_entries.TENSORS}
    sizes = {k: len(v) if v.ndim else 0 for k, v in entries.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"expected a saved batch, but its entries have different sizes: {sizes}.")
    batch = TensorDict(entries, batch_size=[next(iter(sizes.values()))])
    if len(entries) < len(tensors):
        set_images(batch, image_entries.from_tensors(tensors))
    return batch


def save_batch(batch: TensorDict, path: str | Path) -> None:
    """Write a batch to a safetensors file, to replay it without servers.

    Raises:
        DataError: the batch has entries other than images that are not tensors.
    """
    # copies, because safetensors rejects entries that share memory (`prox_logprobs` may be `logprobs` itself)
    tensors = {k: v.clone(memory_format=torch.contiguous_format) for k, v in batch_to_tensors(batch).items()}
    save_file(tensors, str(path))
    Path(path).chmod(Path(path).parent.stat().st_mode & 0o666)  # safetensors creates files that only the owner can read


def load_batch(path: str | Path) -> TensorDict:
    """Read and validate a batch that `save_batch` wrote.

    Raises:
        DataError: the file is missing, is not a safetensors file, or does not contain a valid batch.
    """
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: expected a saved batch (safetensors), but it cannot be read: {error}") from error
    try:
        batch = batch_from_tensors(tensors)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    validate(batch)
    return batch
