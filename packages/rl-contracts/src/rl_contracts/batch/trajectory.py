"""The trajectory batch: one definition of its keys, and the only code that builds, checks, cuts, pads and packs it.

An episode yields `Trajectory` rows (numpy, unpadded). `stack` makes the batch of them: a `TensorDict` of batch size
[B] with per-token entries [B, T] aligned with `input_ids` (entry t speaks of token t). Engines work on the packed form,
`PackedBatch`: the real tokens of all rows end to end, so that padding never reaches attention or a loss.
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

from rl_contracts.batch.packing import unit_indices
from rl_contracts.errors import DataError
from rl_contracts.reward import components_of

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rl_contracts.data import ModelResponse

__all__ = [
    "COMPONENT_PREFIX",
    "SEQUENCE_KEYS",
    "TOKEN_KEYS",
    "UNIT_KEY",
    "PackedBatch",
    "Trajectory",
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
"""Per-token entries, [B, T], of every batch, with their dtypes."""

SEQUENCE_KEYS: dict[str, str] = {
    "rewards": "float32",
    "prompt_ids": "int64",
    "group_ids": "int64",
    "episode_ids": "int64",
    "temperature": "float32",
    "truncated": "bool",
}
"""Per-row entries, [B], of every batch, with their dtypes."""

COMPONENT_PREFIX = "reward_components/"
"""Begins the names of float32 [B] entries: the parts of `rewards`, where all rows have such."""

UNIT_KEY = "unit_ids"
"""int64 [B], where a batch has it: rows of the same unit (the two answers of a preference pair) are learned from in the
same micro-batch, so that a loss may compare them."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """One row before padding: numpy arrays of length T."""

    input_ids: np.ndarray
    """int64 [T] prompt and generated tokens."""
    loss_mask: np.ndarray
    """bool [T] tokens to learn from."""
    logprobs: np.ndarray
    """float32 [T] behaviour policy, as sampled; 0 where not generated."""
    versions: np.ndarray
    """int32 [T] weight version that produced the token; -1 where not generated."""
    reward: float = 0.0
    """Outcome of the episode, the same in all of its rows."""
    temperature: float = 1.0
    """Of the sampler; 1 for greedy answers, whose log-probs are those of the undivided logits."""
    truncated: bool = False
    """Ended by the length limit, not by the model."""
    token_rewards: np.ndarray | None = None
    """float32 [T], where a workflow gives rewards per turn."""
    prompt_id: int = -1
    """Data row that is answered; stamped by the runtime."""
    group_id: int = -1
    """Admission of the prompt; stamped by the runtime."""
    episode_id: int = -1
    """Sample of the group; stamped by the runtime."""
    multi_modal: Any = None
    """Images and processor outputs."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON values for people (prompt text, completion text, gold answer); not part of the batch."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """The summands of `reward`, if the reward function returns an `rl_contracts.reward.CompositeReward`."""

    def __len__(self) -> int:
        return len(self.input_ids)


def from_response(
    response: ModelResponse, *, reward: float, temperature: float, info: dict[str, Any] | None = None
) -> Trajectory:
    """The row of a single-turn answer: learn from every generated token.

    Raises:
        DataError: the response has no generated token, or its lists differ in length.
    """
    prompt, generated = len(response.input_ids), len(response.output_ids)
    if not (generated == len(response.logprobs) == len(response.versions)):
        raise DataError(
            f"response of {response.server or 'a server'}: {generated} tokens, {len(response.logprobs)} "
            f"log-probs, {len(response.versions)} versions; expected one of each per token."
        )
    if not generated:
        raise DataError(
            "response without a generated token; there is nothing to learn from. "
            "Check max_new_tokens and the prompt's length."
        )
    total = prompt + generated
    logprobs = np.zeros(total, dtype=np.float32)
    loss_mask = np.zeros(total, dtype=bool)
    versions = np.empty(total, dtype=np.int32)  # `full` would take twice the time, once per answer
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
    """Right-pad rows to the longest and stack them: a batch of size [len(rows)] that passes `validate`."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    if not rows:
        return empty()
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths.max()))
    mask = np.arange(shape[1]) < lengths[:, None]

    def padded(name: str, fill: float, dtype: Any) -> torch.Tensor:
        entries = [getattr(row, name) for row in rows]
        out = np.full(shape, fill, dtype=dtype)
        out[mask] = np.concatenate(
            [np.zeros(len(row)) if e is None else e for row, e in zip(rows, entries, strict=True)]
        )
        return torch.from_numpy(out)

    def column(name: str, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.array([getattr(row, name) for row in rows], dtype=dtype))

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
    if any(row.token_rewards is not None for row in rows):
        batch["token_rewards"] = padded("token_rewards", 0, np.float32)
    for name in rows[0].reward_components:
        if any(row.reward_components.keys() != rows[0].reward_components.keys() for row in rows):
            names = sorted({part for row in rows for part in row.reward_components})
            raise DataError(f"rewards have different parts, of {names}; expected the same in every row of a batch.")
        batch[COMPONENT_PREFIX + name] = torch.tensor([row.reward_components[name] for row in rows])
    result = TensorDict(batch, batch_size=[len(rows)])
    if any(row.multi_modal is not None for row in rows):
        # a stack, because one list would stay whole when rows are taken out of the batch
        result["multi_modal"] = NonTensorStack(*(NonTensorData(row.multi_modal) for row in rows))
    return result


def empty(width: int = 1) -> TensorDict:
    """A batch of no rows with every key, [0] and [0, width]: the share of a rank that got none."""
    from tensordict import TensorDict

    tokens = {k: torch.zeros(0, width, dtype=getattr(torch, d)) for k, d in TOKEN_KEYS.items()}
    rows = {k: torch.zeros(0, dtype=getattr(torch, d)) for k, d in SEQUENCE_KEYS.items()}
    return TensorDict({**tokens, **rows}, batch_size=[0])


def lengths(batch: TensorDict) -> torch.Tensor:
    """Real tokens per row, int64 [B]."""
    return batch["attention_mask"].sum(-1)


def units(batch: TensorDict) -> list[list[int]]:
    """Rows that stay together, as row indices of each unit; without the entry `unit_ids` each row by itself."""
    return unit_indices(batch[UNIT_KEY].tolist() if UNIT_KEY in batch else range(batch.batch_size[0]))


def validate(batch: TensorDict, generated: bool = True) -> None:
    """Check a batch once, where it enters training.

    Args:
        batch: the batch.
        generated: whether its trained tokens were sampled by a model, and so must carry a version.

    Raises:
        DataError: a key is missing or has the wrong dtype or shape; padding is not on the right; a row is empty; a
            trained token has no version, or lies in the padding; a temperature is not positive; a number is not finite.
    """
    size = batch["input_ids"].shape if "input_ids" in batch else torch.Size([])
    of_rows = SEQUENCE_KEYS | ({UNIT_KEY: "int64"} if UNIT_KEY in batch else {})
    for names, shape in ((TOKEN_KEYS, size), (of_rows, size[:1])):
        for name, dtype in names.items():
            if name not in batch:
                raise DataError(f"batch: key {name!r} is missing; it has {sorted(map(str, batch.keys()))}.")
            value = batch[name]
            if value.dtype != getattr(torch, dtype) or value.shape != shape:
                found = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                raise DataError(f"batch[{name!r}]: expected {dtype} {list(shape)}, found {found}.")
    mask, learn = batch["attention_mask"], batch["loss_mask"]
    temperature = batch["temperature"]
    faults = {
        "is empty: attention_mask is False everywhere": ~mask.any(-1),
        "is not right-padded: a real token follows padding": (mask[:, 1:] & ~mask[:, :-1]).any(-1),
        "has a loss_mask in its padding": (learn & ~mask).any(-1),
        "trains on a token that no version produced (versions is -1)": (learn & (batch["versions"] < 0)).any(-1)
        & generated,
        "has a temperature that is not positive and finite": ~((temperature > 0) & torch.isfinite(temperature)),
        "has log-probs that are not finite": ~torch.isfinite(batch["logprobs"]).all(-1),
        "has a reward that is not finite": ~torch.isfinite(batch["rewards"]),
    }
    for what, bad in faults.items():
        if bad.any():
            row = int(bad.nonzero()[0, 0])
            prompt, group = int(batch["prompt_ids"][row]), int(batch["group_ids"][row])
            raise DataError(f"batch row {row} (prompt {prompt}, group {group}) {what}; {int(bad.sum())} such rows.")


def select(batch: TensorDict, rows: Sequence[int] | torch.Tensor) -> TensorDict:
    """The given rows in the given order, cut to their longest; [len(rows)]."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    return trim(batch[index]) if len(index) else batch[:0]


def trim(batch: TensorDict) -> TensorDict:
    """Cut the padding that no row needs."""
    from tensordict import TensorDict

    width = batch["attention_mask"].shape[1]
    longest = max(int(lengths(batch).max()) if batch.batch_size[0] else 1, 1)
    if longest == width:
        return batch
    cut = {k: v[:, :longest] if is_token_entry(v, width) else v for k, v in batch.items()}
    return TensorDict(cut, batch_size=batch.batch_size)


def concatenate(batches: Sequence[TensorDict]) -> TensorDict:
    """Rows of several batches with the same keys, re-padded to the longest.

    Raises:
        DataError: there is no batch, or their keys differ.
    """
    from tensordict import TensorDict

    if not batches:
        raise DataError("concatenate: expected at least one batch, found none.")
    keys = set(batches[0].keys())
    for other in batches[1:]:
        if set(other.keys()) != keys:
            raise DataError(f"concatenate: batches differ in keys: {sorted(map(str, keys ^ set(other.keys())))}.")
    width = max(b["input_ids"].shape[1] for b in batches)
    grown = [pad_to(b, width) for b in batches]
    return TensorDict(
        {k: torch.cat([b.get(k) for b in grown]) for k, _ in grown[0].items()},
        batch_size=[sum(b.batch_size[0] for b in batches)],
    )


def pad_to(batch: TensorDict, width: int) -> TensorDict:
    """Right-pad per-token entries to [B, width]: versions with -1, everything else with 0."""
    from tensordict import TensorDict

    old = batch["input_ids"].shape[1]
    if old == width:
        return batch
    if old > width:
        raise DataError(f"pad_to: the batch is {old} wide already; cannot pad to {width}.")
    entries: dict[str, Any] = {str(k): v for k, v in batch.items()}
    grown = {
        k: pad(v, (0, 0) * (v.ndim - 2) + (0, width - old), value=-1 if k == "versions" else 0)
        for k, v in entries.items()
        if is_token_entry(v, old)
    }
    return TensorDict(entries | grown, batch_size=batch.batch_size)


def is_token_entry(value: Any, width: int) -> bool:
    """Whether an entry of a batch speaks of tokens ([B, T, ...]) and not of rows ([B])."""
    return getattr(value, "ndim", 0) >= 2 and value.shape[1] == width


@dataclass(slots=True)
class PackedBatch:
    """Real tokens of S rows end to end, N tokens in all. `packed[name]` finds an entry of tokens [N] or of rows [S]."""

    cu_seqlens: torch.Tensor
    """int32 [S + 1] where each row begins, and N."""
    max_seqlen: int
    """Length of the longest row."""
    position_ids: torch.Tensor
    """int64 [N] position of each token in its row."""
    sequence_of_token: torch.Tensor
    """int64 [N] row in which each token lies, 0 to S - 1."""
    tokens: dict[str, torch.Tensor]
    """Per-token entries, [N]."""
    sequences: dict[str, torch.Tensor]
    """Per-row entries, [S]; `unit_ids`, where the batch has them, count from 0 here."""
    num_units: int
    """U: units of rows that stay together; S where the batch has no `unit_ids`."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            known = sorted([*self.tokens, *self.sequences])
            raise DataError(f"packed batch: no entry {name!r}; it has {known}. Did a stage before this one not run?")
        return self.tokens[name] if name in self.tokens else self.sequences[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.position_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.cu_seqlens.shape[0]) - 1

    def per_token(self, name: str) -> torch.Tensor:
        """A per-row entry spread over its tokens, [N]."""
        return self.sequences[name][self.sequence_of_token]

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of per-token values [N] in each row, [S]; carries gradient."""
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence_of_token, values)

    def unit_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of per-row values [S] in each unit, [U]; carries gradient."""
        if UNIT_KEY not in self.sequences:
            return values
        return values.new_zeros(self.num_units).index_add(0, self.sequences[UNIT_KEY], values)

    def last_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """The entry of each row's last token, [S], of per-token values [N]; carries gradient."""
        return values[self.cu_seqlens[1:].long() - 1]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same on another device, without waiting for the copy."""

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
        )


def pack(batch: TensorDict) -> PackedBatch:
    """Lay the rows of a batch on the CPU end to end. Entries that are not tensors are left out."""
    mask = batch["attention_mask"]
    width, sizes = mask.shape[1], mask.sum(-1)
    cu_seqlens = torch.zeros(len(sizes) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=cu_seqlens[1:])
    tensors: dict[str, torch.Tensor] = {
        str(k): v for k, v in batch.items() if isinstance(v, torch.Tensor) and k != "attention_mask"
    }
    num_units = len(sizes)
    if UNIT_KEY in tensors:
        seen, tensors[UNIT_KEY] = torch.unique(tensors[UNIT_KEY], return_inverse=True)
        num_units = len(seen)
    return PackedBatch(
        cu_seqlens=cu_seqlens,
        max_seqlen=int(sizes.max()) if len(sizes) else 0,
        position_ids=torch.arange(width).expand_as(mask)[mask],
        sequence_of_token=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        tokens={k: v[mask] for k, v in tensors.items() if is_token_entry(v, width)},
        sequences={k: v for k, v in tensors.items() if not is_token_entry(v, width)},
        num_units=num_units,
    )


def unpack(values: torch.Tensor, batch: TensorDict) -> torch.Tensor:
    """Inverse of `pack` for one per-token entry: [N] to [B, T] of the batch that was packed, 0 at padding."""
    mask = batch["attention_mask"]
    out = values.new_zeros(mask.shape)
    out[mask] = values
    return out


def save_batch(batch: TensorDict, path: str | Path) -> None:
    """Write a batch as safetensors, for replaying it without servers.

    Raises:
        DataError: the batch holds entries that are not tensors.
    """
    others = [str(k) for k, v in batch.items() if not isinstance(v, torch.Tensor)]
    if others:
        raise DataError(f"save_batch: entries {others} are not tensors and cannot be saved; drop them first.")
    # copies, because safetensors refuses entries that share memory (`prox_logprobs` may be `logprobs` itself)
    tensors: dict[str, Any] = {str(k): v for k, v in batch.items()}
    save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, str(path))
    Path(path).chmod(Path(path).parent.stat().st_mode & 0o666)  # safetensors writes private files


def load_batch(path: str | Path) -> TensorDict:
    """Read what `save_batch` wrote and validate it.

    Raises:
        DataError: the file is missing, is no safetensors file, or holds no valid batch.
    """
    from tensordict import TensorDict

    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: expected a saved batch (safetensors), but it cannot be read: {error}") from error
    rows = {k: len(v) if v.ndim else 0 for k, v in tensors.items()}
    if len(set(rows.values())) != 1:
        raise DataError(f"{path}: expected a saved batch, but its entries differ in their number of rows: {rows}.")
    batch = TensorDict(tensors, batch_size=[next(iter(rows.values()))])
    validate(batch)
    return batch
