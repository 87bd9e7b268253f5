"""`rl generate`: talks to a model in this process, token by token, over several turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_apps.run.summary import last_checkpoint
from rl_apps.settings.model import check_generates
from rl_contracts.chat.rendering import ChatRenderer
from rl_contracts.config import GenerationConfig, require
from rl_contracts.errors import DataError, ModelError
from rl_contracts.models.directory import check_model_directory, context_length


def model_of(path: Path) -> Path:
    """The model directory that is meant: the path itself, or the last checkpoint of the run there.

    Raises:
        ModelError: there is no model, or the run has no checkpoint.
    """
    if (path / "config.yaml").is_file() or (path / "checkpoints").is_dir():
        checkpoint = last_checkpoint(path)
        if checkpoint is None:
            raise ModelError(
                f"{path}: expected a run with a checkpoint, found none in {path / 'checkpoints'}. A run writes one at "
                "its end, and every checkpoint.every steps."
            )
        path = checkpoint
    elif not path.is_dir():
        raise ModelError(
            f"{path}: expected the directory of a run, a checkpoint or a Hugging Face model, found "
            f"{'a file' if path.is_file() else 'no directory'}. A "
            "model of the hub is fetched with `hf download`, which says where it lies."
        )
    check_model_directory(str(path.absolute()), "rl generate", tokenizer=True)
    return path


class ChatSession:
    """A conversation with a model. What was said stays as the ids that were sampled.

    Args:
        directory: of the model.
        generation: how answers are sampled.
        system: a system message; empty: none.
        device: where it computes; empty: on a GPU where there is one.
        seed: of the sampling; None: another one each time.

    Raises:
        ModelError: it cannot be loaded, or generates no text.
        ConfigError: its tokenizer has no chat template.
    """

    def __init__(
        self,
        directory: Path,
        generation: GenerationConfig,
        system: str = "",
        device: str = "",
        seed: int | None = None,
    ) -> None:
        import torch
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()  # what it says of a model is for people who write one
        logging.disable_progress_bar()
        logging.get_logger("torch.utils._pytree").setLevel(logging.ERROR)  # and of torchao, which it imports
        require(device != "cuda" or torch.cuda.is_available(), "--device", "cpu: there is no GPU here", device)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.generation, self._system = generation, system
        self.room = context_length(str(directory))
        self._renderer = ChatRenderer(AutoTokenizer.from_pretrained(directory))
        self._model = _load(directory, self.device)
        self._random = torch.Generator(self.device)
        self._random.manual_seed(seed) if seed is not None else self._random.seed()
        self.ids: list[int] = []

    def ask(self, text: str) -> Iterator[str]:
        """Say something; yields the answer, piece by piece.

        Raises:
            DataError: there is no room for an answer in the model's context.
        """
        turn = [{"role": "user", "content": text}]
        if self.ids:
            self.ids = self._renderer.append_turn(self.ids, turn)
        else:
            system = [{"role": "system", "content": self._system}] if self._system else []
            self.ids = self._renderer.render([*system, *turn])
        room = self.generation.max_new_tokens if self.room is None else self.room - len(self.ids)
        if room <= 0:
            raise DataError(
                f"the conversation has {len(self.ids)} tokens, and the model's context {self.room}: no answer fits. "
                "Begin a new one, or say less."
            )
        shown, answer = "", list[int]()
        for token in self._sample(min(room, self.generation.max_new_tokens)):
            self.ids.append(token)
            if token in self._renderer.stop_ids:
                break
            answer.append(token)
            whole = self._renderer.decode_completion(answer)
            if not whole.endswith("\ufffd"):  # half a character
                yield whole[len(shown) :]
                shown = whole

    def _sample(self, most: int) -> Iterator[int]:
        """Tokens after `ids`."""
        import torch

        new, cache = torch.tensor([self.ids], device=self.device), None
        for _ in range(most):
            with torch.inference_mode():
                output = self._model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            token = _drawn(output.logits[0, -1].float(), self.generation, self._random)
            yield token
            new = torch.tensor([[token]], device=self.device)


def chat(talk: ChatSession, prompt: str | None) -> int:
    """Print the answer to a prompt, or to each line of the input until that ends.

    Returns:
        the exit code.
    """
    if prompt is not None:
        _answer(talk, prompt)
        return 0
    asks = sys.stdin.isatty()
    if asks:
        print("A line is a turn; Ctrl-D ends the conversation.")
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            return 0
        if line.strip():
            _answer(talk, line)
            print(end="" if asks else "\n", flush=True)  # an answer may have several lines


def _answer(talk: ChatSession, text: str) -> None:
    for piece in talk.ask(text):
        print(piece, end="", flush=True)
    print(flush=True)


def _load(directory: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    check_generates(str(directory), directory)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        return model.to(device).eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:  # whatever transformers makes of a directory
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{directory}: expected a model that transformers can load, found: {first}") from error


def _drawn(logits: Any, generation: GenerationConfig, random: Any) -> int:
    """A token, of [vocabulary] logits."""
    import torch

    if generation.greedy:
        return int(logits.argmax())
    chances, order = torch.softmax(logits / generation.temperature, -1).sort(descending=True)
    chances = chances.masked_fill(chances.cumsum(-1) - chances >= generation.top_p, 0.0)
    return int(order[torch.multinomial(chances, 1, generator=random)])
