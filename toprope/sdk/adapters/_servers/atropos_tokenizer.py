"""The tokenizer of an Atropos environment, and one that stands in where it cannot be had.

Atropos tells rollouts apart by their tokens, and here these are decoded again: training uses the tokens that the policy
sampled. So any tokenizer does that gives a text back, and one of bytes needs no download.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from toprope.sdk.adapters._shared.chatml import folder_of_bytes
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import MissingKnobs, no_hosts_noted

__all__ = ["require_tokenizer", "templates_give_lists", "tokenizer_here"]


@functools.cache
def tokenizer_here(name: str) -> str:
    """Return a name if its tokenizer loads here and has a chat template, or the folder of a tokenizer of bytes."""
    from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]

    try:
        with no_hosts_noted():
            if AutoTokenizer.from_pretrained(name).chat_template:
                return name
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        print(f"The tokenizer {name!r} does not load, so one of bytes stands in: {why}", file=sys.stderr)
    return folder_of_bytes()


def require_tokenizer(name: str) -> None:
    """Load the tokenizer that the owner names.

    Raises:
        MissingKnobs: It does not load.
    """
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise MissingKnobs(
            f"The tokenizer {name!r} cannot be loaded. A folder must be readable behind the wall: the owner lists it "
            f"under `reads` of this environment in settings.yaml. {first_line(str(error))}",
            "tokenizer",
        ) from error


def templates_give_lists() -> None:
    """Have every tokenizer's `apply_chat_template` return a list of token ids unless `return_dict` is given.

    It did before transformers 5, and atroposlib 0.4 takes its length and slices it.
    """
    from transformers import PreTrainedTokenizerBase

    apply_template = PreTrainedTokenizerBase.apply_chat_template
    if inspect.signature(apply_template).parameters["return_dict"].default:
        listed: Any = functools.partialmethod(apply_template, return_dict=False)
        PreTrainedTokenizerBase.apply_chat_template = listed  # type: ignore[method-assign,unused-ignore]
