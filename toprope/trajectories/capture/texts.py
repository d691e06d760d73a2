"""The words of a rollout, and where they come from.

A journal keeps tokens, and texts for people, which are cut. So words are decoded from the tokens by the run's own
tokenizer; where that is not there, what was kept is used. Every item says which (`metadata["text"]`):

    messages   the environment posted the conversation itself
    tokens     decoded, and taken apart into messages by the chat template: whole
    rendered   decoded, but the template cannot be taken apart: whole, the prompt is one text with its marks
    kept       what was kept for people, which was short enough to be whole
    cut        the same, but its middle was left out
    none       nothing is known but tokens and reward

Only the library `tokenizers` is loaded, and no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.trajectories.capture.templates import ChatTemplate
from toprope.trajectories.items import Message

__all__ = ["CUT", "TextSource", "Words", "reader_of", "tokenizer_folder"]

TextSource = Literal["messages", "tokens", "rendered", "kept", "cut", "none"]

CUT = "\n[...]\n"
"""Stands where a text for people was cut."""
_MOST_PROMPTS = 4096
"""Prompts whose messages are remembered: the rollouts of a group have the same."""
_CANNOT = (ImportError, OSError, ValueError, KeyError, TypeError)


def tokenizer_folder(folder: RunFolder, specification: Specification) -> Path | None:
    """A folder with the run's tokenizer: its newest checkpoint's, else the policy's that it began as, if that is still
    on this machine."""
    checkpoint = folder.newest_checkpoint()
    places = [checkpoint / "model"] if checkpoint is not None else []
    model = specification.config.policy.model
    if model.startswith("embedded"):
        from toprope.training.policy.loading import EMBEDDED, embedded_folder

        places += [embedded_folder(Path(specification.policy_cache), model)] if model in EMBEDDED else []
    else:
        places.append(Path(model).expanduser())
        if (cached := _from_hub(model, specification.config.policy.revision)) is not None:
            places.append(cached)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)


def _from_hub(model: str, revision: str | None) -> Path | None:
    """Of the Hub's cache on this machine; nothing is fetched."""
    if model.startswith((".", "/", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "tokenizer.json", revision=revision)
    except _CANNOT:
        return None
    return Path(found).parent if isinstance(found, str) else None


@dataclass(frozen=True)
class Words:
    """What was said in a rollout, and where that is from."""

    state: str | list[Message]
    action: str | list[Message]
    source: TextSource


class Reader:
    """Decodes with one tokenizer."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self._template = _template_of(folder, [added[number].content for number in sorted(self._special)])
        self._prompts: dict[tuple[int, ...], tuple[str, list[Message] | None]] = {}

    def words(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], masked: int, kept: str | None) -> Words:
        """The words of a rollout.

        Args:
            rows: For each of its sequences the tokens and their mask.
            masked: What the mask holds where nothing was sampled.
            kept: The prompt as it was kept for people, to hold against.
        """
        state: str | list[Message] = ""
        action: list[Message] = []
        whole = True
        for number, (tokens, mask) in enumerate(rows):
            for place, (sampled, start, end) in enumerate(_spans(mask, masked)):
                ids = tokens[start:end]
                if sampled:
                    action.append({"role": "assistant", "content": self._answer(ids)})
                elif place == 0:
                    text, messages = self._prompt(tuple(ids))
                    if number == 0:
                        whole = messages is not None and _agrees(messages, kept)
                        state = messages if messages is not None and whole else text
                    else:  # the template rewrote what was before: only what came last is new
                        action += _newest(messages, text)
                        whole = whole and messages is not None
                elif end < len(tokens) or _said_something(ids, self._special):
                    text = self._decode(ids)
                    between = None if self._template is None else self._template.between(text)
                    if between is None and end == len(tokens):
                        continue  # the end mark of the last answer
                    whole = whole and between is not None
                    action += between if between is not None else [{"role": "user", "content": text}]
        if not rows:
            return Words("", "", "none")
        answer: str | list[Message] = action[0]["content"] if len(action) == 1 else action
        if isinstance(state, str):
            return Words(state, answer, "rendered")
        return Words(state, action, "tokens" if whole else "rendered")

    def _prompt(self, ids: tuple[int, ...]) -> tuple[str, list[Message] | None]:
        if (known := self._prompts.get(ids)) is None:
            text = self._decode(ids)
            known = text, None if self._template is None else self._template.before(text)
            if len(self._prompts) >= _MOST_PROMPTS:
                self._prompts.clear()
            self._prompts[ids] = known
        return known

    def _answer(self, ids: Sequence[int]) -> str:
        end = len(ids)
        while end and ids[end - 1] in self._special:
            end -= 1
        return self._decode(ids[:end])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _spans(mask: Sequence[int], masked: int) -> list[tuple[bool, int, int]]:
    """Runs of tokens that were sampled and that were not, in order, a run that was not first (it may be empty)."""
    spans: list[tuple[bool, int, int]] = []
    start, sampled = 0, False
    for place, value in enumerate(mask):
        if (value != masked) is not sampled:
            spans.append((sampled, start, place))
            start, sampled = place, not sampled
    spans.append((sampled, start, len(mask)))
    return spans


def _said_something(ids: Sequence[int], special: set[int]) -> bool:
    return any(one not in special for one in ids)


def _newest(messages: list[Message] | None, text: str) -> list[Message]:
    if messages is None:
        return [{"role": "user", "content": text}]
    last = max((place for place, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
    return list(messages[last + 1 :])


def _agrees(messages: list[Message], kept: str | None) -> bool:
    """Whether messages that were taken apart say what was kept for people of the prompt."""
    if not kept:
        return True
    said = "".join("".join(one["content"].split()) for one in messages)
    head, cut, tail = kept.partition(CUT)
    if not cut:
        return said == "".join(kept.split())
    return said.startswith("".join(head.split())) and said.endswith("".join(tail.split()))


def _template_of(folder: Path, special: Sequence[str]) -> ChatTemplate | None:
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        beside = folder / "chat_template.jinja"
        source = beside.read_text(encoding="utf-8") if beside.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        named = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        named = {name: one.get("content") if isinstance(one, dict) else one for name, one in named.items()}
        return ChatTemplate(source, special, {name: one for name, one in named.items() if isinstance(one, str)})
    except Exception:  # what Jinja raises for a model's template: its words are told as they were rendered
        return None


def reader_of(folder: RunFolder) -> Reader | None:
    """What decodes a run's tokens; None where its tokenizer is not on this machine any more."""
    try:
        place = tokenizer_folder(folder, Specification.read(folder))
        return None if place is None else Reader(place)
    except (NotFound, Corrupt):
        return None
    except Exception as error:  # tokenizers raises plain Exception for a file that is none
        if type(error) is not Exception and not isinstance(error, _CANNOT):
            raise
        return None


def kept_words(prompt: str | None, answer: str | None, conversation: Any = None) -> Words:
    """The words without a tokenizer: the conversation that an outside environment posted, else what was kept."""
    if isinstance(conversation, list) and all(isinstance(one, dict) for one in conversation):
        first = next((place for place, one in enumerate(conversation) if one.get("role") == "assistant"), None)
        if first is not None:
            return Words(conversation[:first], conversation[first:], "messages")
    if prompt is None and answer is None:
        return Words("", "", "none")
    cut = CUT in (prompt or "") or CUT in (answer or "")
    return Words(prompt or "", answer or "", "cut" if cut else "kept")
