"""Lengths of texts in tokens of a policy, as far as its tokenizer is on this machine; no model is loaded.

Embedded policies have a token per byte and one per known phrase. Other models have a tokenizer.json in their folder or
in the Hub's cache; marks of their chat template are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RUN_ID, RunFolder
from toprope.records.run.specification import Specification
from toprope.training.policy.tiny_model import RECIPES, Recipe

_RUN = "run:"
_MOST_BYTES = 200_000
"""Of a text; a longer one is as good as endless."""


class TokenCounter:
    """Counts tokens of one policy.

    Args:
        name: The policy's, for answers.
        text: Counts the tokens of a text.
        message: Tokens of a message beside its text.
        prompt: Tokens before the answer beside all messages.
    """

    def __init__(self, name: str, text: Callable[[str], int], message: int = 0, prompt: int = 0) -> None:
        self.name, self._text, self._message, self._prompt = name, text, message, prompt
        self.exact = message > 0
        """If the marks of the chat template are counted, too."""

    def text(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._text(text[:_MOST_BYTES])

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the tokens of a conversation up to the start of its answer."""
        return sum(self._message + self.text(str(message.get("content") or "")) for message in messages) + self._prompt


def counter_of(model: str, runs: Path | None = None) -> TokenCounter | None:
    """Return the counter of `policy.model`; None if its tokenizer is not on this machine.

    Args:
        runs: The folder of runs, for `run:<id>`.
    """
    base = model
    while base.startswith(_RUN) and runs is not None:
        run_id = base.removeprefix(_RUN).partition("@")[0]
        try:
            base = Specification.read(RunFolder(runs / run_id)).config.policy.model if RUN_ID.fullmatch(run_id) else ""
        except (NotFound, Corrupt, ValueError):
            return None
    if (recipe := RECIPES.get(base)) is not None:
        return TokenCounter(model, lambda text: _embedded(text, recipe), message=2, prompt=1)
    folders = [Path(base).expanduser()] if base else []
    folders += sorted((hub_cache() / f"models--{base.replace('/', '--')}" / "snapshots").glob("*"), reverse=True)
    for folder in folders:
        if (counted := _load_counter(folder / "tokenizer.json")) is not None:
            return TokenCounter(model, counted)
    return None


def hub_cache(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which the Hub's client keeps downloads, by these variables or this process's own."""
    environ = os.environ if variables is None else variables
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _embedded(text: str, recipe: Recipe) -> int:
    phrases = 0
    for phrase in sorted(recipe.phrase_tokens, key=len, reverse=True):
        phrases += text.count(phrase)
        text = text.replace(phrase, "")
    return phrases + len(text.encode())


def _load_counter(path: Path) -> Callable[[str], int] | None:
    """Return a function that counts with a tokenizer's file; None if it is not there or cannot be read."""
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer  # comes with what trains; the server alone may lack it

        loaded = Tokenizer.from_file(str(path))
    except Exception:  # the package raises bare exceptions
        return None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
