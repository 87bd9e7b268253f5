"""`rl generate`: chat with a model in this process, over several turns."""

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


def model_of(path: Path, command: str = "rl generate") -> Path:
    """Return the model directory: the path itself, or the last checkpoint if the path is a run directory.

    Args:
        path: directory of a model or a run.
        command: command for messages.

    Raises:
        ModelError: the path has no model, or the run has no checkpoint.
    """
    if (path / "config.yaml").is_file() or (path / "checkpoints").is_dir():
        checkpoint = last_checkpoint(path)
        if checkpoint is None:
            raise ModelError(
                f"{path}: expected a run with a checkpoint, found none in {path / 'checkpoints'}. A run saves one at "
                "its end and every checkpoint.every steps."
            )
        path = checkpoint
    elif not path.is_dir():
        raise ModelError(
            f"{path}: expected the directory of a run, a checkpoint or a Hugging Face model, found "
            f"{'a file' if path.is_file() else 'no directory'}. "
            "Download a model of the hub with `hf download`, which prints its directory."
        )
    check_model_directory(str(path.absolute()), command, tokenizer=True)
    return path


class ChatSession:
    """Conversation with a model. Earlier turns keep their sampled token ids.

    Args:
        directory: directory of the model.
        generation: sampling settings.
        system: system message, or an empty string for none.
        device: `cpu` or `cuda`; an empty string selects a GPU if available.
        seed: seed of the sampling, or None for a random one.

    Raises:
        ModelError: the model cannot be loaded, or does not generate text.
        ConfigError: the tokenizer has no chat template.
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

        logging.set_verbosity_error()  # messages for authors of models
        logging.disable_progress_bar()
        logging.get_logger("torch.utils._pytree").setLevel(logging.ERROR)  # also warnings on the import of torchao
        require(
            device != "cuda" or torch.cuda.is_available(),
            "--device",
            "cpu, since this machine has no usable GPU",
            device,
        )
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.generation, self._system = generation, system
        self.room = context_length(str(directory))
        self._renderer = ChatRenderer(AutoTokenizer.from_pretrained(directory))
        self._model = _load(directory, self.device)
        self._random = torch.Generator(self.device)
        self._random.manual_seed(seed) if seed is not None else self._random.seed()
        self.ids: list[int] = []

    def ask(self, text: str) -> Iterator[str]:
        """Send a user turn, and yield the completion in pieces of text.

        Raises:
            DataError: no completion fits into the context of the model.
        """
        turn = [{"role": "user", "content": text}]
        if self.ids:
            self.ids = self._renderer.append_turn(self.ids, turn)
        else:
            system = [{"role": "system", "content": self._system}] if self._system else []
            self.ids = self._renderer.render([*system, *turn])
        space = self.generation.max_new_tokens if self.room is None else self.room - len(self.ids)
        if space <= 0:
            raise DataError(
                f"the conversation has {len(self.ids)} tokens; no completion fits into the model's context of "
                f"{self.room}. Start a new conversation, or shorten the prompt."
            )
        printed, completion = "", list[int]()
        for token in self._sample(min(space, self.generation.max_new_tokens)):
            self.ids.append(token)
            if token in self._renderer.stop_ids:
                break
            completion.append(token)
            text_so_far = self._renderer.decode_completion(completion)
            if not text_so_far.endswith("\ufffd"):  # incomplete character
                yield text_so_far[len(printed) :]
                printed = text_so_far

    def _sample(self, limit: int) -> Iterator[int]:
        """Yield at most `limit` sampled tokens that continue `ids`."""
        import torch

        inputs, cache = torch.tensor([self.ids], device=self.device), None
        for _ in range(limit):
            with torch.inference_mode():
                output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            token = _sampled_token(output.logits[0, -1].float(), self.generation, self._random)
            yield token
            inputs = torch.tensor([[token]], device=self.device)


def chat(talk: ChatSession, prompt: str | None) -> int:
    """Print the completion of a prompt, or of each line of the standard input.

    Returns:
        the exit code.
    """
    if prompt is not None:
        _print_completion(talk, prompt)
        return 0
    interactive = sys.stdin.isatty()
    if interactive:
        print("Each line is a turn; press Ctrl-D to end the conversation.")
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            return 0
        if line.strip():
            _print_completion(talk, line)
            print(end="" if interactive else "\n", flush=True)  # a blank line, since completions may have several lines


def _print_completion(talk: ChatSession, text: str) -> None:
    for piece in talk.ask(text):
        print(piece, end="", flush=True)
    print(flush=True)


def _load(directory: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    check_generates(str(directory), directory)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        return model.to(device).eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:  # errors of transformers for an invalid directory
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{directory}: expected a model that transformers can load, found: {first_line}") from error


def _sampled_token(logits: Any, generation: GenerationConfig, random: Any) -> int:
    """Sample a token id from logits [vocabulary]."""
    import torch

    if generation.greedy:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / generation.temperature, -1).sort(descending=True)
    probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= generation.top_p, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=random)])
