"""Generate items from templates and from other items, without a model."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toprope.errors import InvalidValue
from toprope.records.trained_tasks import content_id
from toprope.trajectories.items import Message, TrajectoryItem, as_messages, text_of
from toprope.trajectories.synthesis.pipeline import DataSynthesiser

_SLOT = re.compile(r"\{([A-Za-z_]\w*)\}")
_KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_MOST_COMBINATIONS = 1_000_000


class TemplateSynthesiser(DataSynthesiser):
    """Fills the slots of templates from lists of values.

    Up to a million combinations are generated once each, in an order shuffled by the seed.

    Args:
        templates: Questions (`"What is {a} + {b}?"`), or mappings with `state` and `action`. A slot is a name in
            braces; all other braces are literal.
        variables: Values by slot. A mapping as value fills several slots at once by its keys:
            `{"pair": [{"a": "1", "sum": "3"}, ...]}`.

    Raises:
        InvalidValue: A slot has no values, or there are no templates.
    """

    def __init__(
        self, templates: Sequence[str | Mapping[str, str]], variables: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        self._templates = [
            {"state": source, "action": ""} if isinstance(source, str) else dict(source) for source in templates
        ]
        variables = variables or {}
        if not self._templates:
            raise InvalidValue("There are no templates.", hint='For example ["What is {a} + {b}?"].')
        for template in self._templates:
            if not template.keys() <= {"state", "action"} or not template.get("state"):
                raise InvalidValue("A template is a text, or a mapping of state and action.", hint="Both are texts.")
        for name, values in variables.items():
            if isinstance(values, str) or not values:
                raise InvalidValue(f"The variable {name} needs a list of values.", hint=f'"{name}": ["x", "y"]')
        filled = set(variables) | {
            str(key) for values in variables.values() for value in values if isinstance(value, Mapping) for key in value
        }
        for template in self._templates:
            for slot in _SLOT.findall(f"{template['state']}{template.get('action', '')}"):
                if slot not in filled:
                    raise InvalidValue(
                        f"The slot {{{slot}}} has no values.", hint=f"Variables: {', '.join(variables)}."
                    )
        self._variables = {name: list(values) for name, values in variables.items()}
        self._sources = [self._names(template) for template in self._templates]
        sizes = [self._combinations(names) for names in self._sources]
        self._listed = sum(sizes) <= _MOST_COMBINATIONS
        self._sizes = sizes
        self._order: list[int] | None = None

    def _names(self, template: Mapping[str, str]) -> list[str]:
        slots = set(_SLOT.findall(f"{template['state']}{template.get('action', '')}"))
        return [
            name
            for name, values in self._variables.items()
            if name in slots or any(isinstance(value, Mapping) and slots & value.keys() for value in values)
        ]

    def _combinations(self, names: Sequence[str]) -> int:
        size = 1
        for name in names:
            size *= len(self._variables[name])
        return size

    async def generate(self, count: int) -> list[TrajectoryItem]:
        if not self._listed:  # Too many to list: draw at random; the pipeline removes repetitions.
            numbers = [self.random.randrange(len(self._templates)) for _ in range(count)]
            return [self._fill(number, self.random.randrange(self._sizes[number])) for number in numbers]
        if self._order is None:
            self._order = list(range(sum(self._sizes)))
            random.Random(self.seed).shuffle(self._order)
        chosen = self._order[self.place : self.place + count]
        self.place += len(chosen)
        return [self._fill(*self._place(combination)) for combination in chosen]

    def _place(self, combination: int) -> tuple[int, int]:
        """Return the template of a number, and the combination within it."""
        for number, size in enumerate(self._sizes):
            if combination < size:
                return number, combination
            combination -= size
        raise IndexError(combination)

    def _fill(self, number: int, place: int) -> TrajectoryItem:
        values: dict[str, str] = {}
        for name in self._sources[number]:
            place, at = divmod(place, len(self._variables[name]))
            value = self._variables[name][at]
            if isinstance(value, Mapping):
                values |= {str(key): str(part) for key, part in value.items()}
            else:
                values[name] = str(value)
        template = self._templates[number]

        def fill(text: str) -> str:
            return _SLOT.sub(lambda slot: values.get(slot[1], slot[0]), text)

        metadata = {"origin": "template", "template": number, "unscored": True}
        return TrajectoryItem(fill(template["state"]), fill(template.get("action", "")), 0.0, metadata)


class Mutation(DataSynthesiser):
    """Makes new items from those of the steps before it: with noise in the question, or question and answer swapped.

    Args:
        kind: `noise` or `swap_io`.
        level: Share of the question's characters to mistype, for `noise`.
    """

    mutates = True

    def __init__(self, kind: str = "noise", level: float = 0.05) -> None:
        if kind not in ("noise", "swap_io"):
            raise InvalidValue(f"Unknown mutation {kind!r}.", hint="Mutations: noise, swap_io.")
        _check_level(level)
        self._kind, self._level = kind, level

    async def generate(self, count: int) -> list[TrajectoryItem]:
        former = self.at.former
        if not former:
            return []
        chosen = [former[self.random.randrange(len(former))] for _ in range(count)]
        if self._kind == "swap_io":
            return swap_io(chosen)
        return add_noise(chosen, self._level, seed=self.random.randrange(2**31))


def add_noise(items: Iterable[TrajectoryItem], level: float, *, seed: int = 0) -> list[TrajectoryItem]:
    """Return copies with mistyped questions: characters swapped, dropped, doubled or replaced by a neighbouring key.

    Args:
        items: Items to copy; not modified.
        level: Share of the characters in each user message to change, from 0 to 1.
        seed: Seed of the changes.

    Raises:
        InvalidValue: The level is outside 0 to 1.
    """
    _check_level(level)
    dice = random.Random(seed)
    noisy = []
    for item in items:
        state: str | list[Message]
        if isinstance(item.state, str):
            state = _mistype(item.state, level, dice)
        else:
            state = [
                {**message, "content": _mistype(message["content"], level, dice)}
                if message.get("role") == "user" and isinstance(message.get("content"), str)
                else message
                for message in item.state
            ]
        metadata = {**item.metadata, **_first_of(item), "origin": "noise", "noise": level}
        noisy.append(TrajectoryItem(state, item.action, item.reward, metadata))
    return noisy


def swap_io(items: Iterable[TrajectoryItem]) -> list[TrajectoryItem]:
    """Return copies with state and action swapped, which ask for the question given the answer.

    They have no score, because nobody judged them.
    """
    swapped = []
    for item in items:
        system_messages = [message for message in as_messages(item.state, "user") if message.get("role") == "system"]
        metadata = {**item.metadata, **_first_of(item), "origin": "swap_io", "unscored": True}
        for gone in ("success", "score", "parts", "task", "index", "tools"):
            metadata.pop(gone, None)
        question = text_of([message for message in as_messages(item.state, "user") if message.get("role") != "system"])
        state: str | list[Message] = text_of(item.action)
        if system_messages:
            state = [*system_messages, {"role": "user", "content": state}]
        swapped.append(TrajectoryItem(state, question, 0.0, metadata))
    return swapped


def _first_of(item: TrajectoryItem) -> dict[str, Any]:
    """Return the metadata by which a copy is known as one of its first item's task, which may be held out."""
    metadata = item.metadata
    origin = {
        "made_from": item.first_id,
        "first_prompt": metadata.get("first_prompt") or content_id(as_messages(item.state, "user")),
    }
    task = metadata.get("first_task") or metadata.get("task")
    return {**origin, "first_task": task} if task else origin


def _check_level(level: float) -> None:
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 <= level <= 1:
        raise InvalidValue(f"The level of noise must be from 0 to 1, not {level!r}.", hint="0.05 mistypes one in 20.")


def _mistype(text: str, level: float, dice: random.Random) -> str:
    letters = list(text)
    places = [place for place, letter in enumerate(letters) if letter.isalnum()]
    for place in dice.sample(places, min(len(places), round(level * len(letters)))):
        letter, how = text[place], dice.randrange(4)
        if how == 0 and place + 1 < len(letters):
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
        elif how == 1:
            letters[place] = ""
        elif how == 2:
            letters[place] *= 2
        else:
            letters[place] = _neighbour_of(letter, dice)
    return "".join(letters)


def _neighbour_of(letter: str, dice: random.Random) -> str:
    """Return a neighbouring key, or another digit for a digit."""
    if letter.isdigit():
        return str(dice.randrange(10))
    small = letter.lower()
    for row, keys in enumerate(_KEYS):
        at = keys.find(small)
        if at >= 0:
            neighbours = [keys[column] for column in (at - 1, at + 1) if 0 <= column < len(keys)]
            neighbours += [
                other_keys[at]
                for other_keys in _KEYS[max(0, row - 1) : row + 2]
                if other_keys is not keys and at < len(other_keys)
            ]
            key = dice.choice(neighbours)
            return key.upper() if letter.isupper() else key
    return dice.choice(list(itertools.chain(*_KEYS)))
