"""Damaged files of the owner: the answer names the file and the error, and the file stays unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator

from benchmarks.wrong_inputs.installation import Answer, Case, Expected, Installation

__all__ = ["CASES"]

_OWNER = "the owner's files"


def _owner(title: str, place: str, content: str | bytes, names: tuple[str, ...], cause: tuple[str, ...]) -> Case:
    async def play(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
        path = site.config / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        arguments = {"preset": path.stem} if path.parent.name == "presets" else {}
        await site.connect()
        site.mark()
        answer = await site.call("select_environment", name="sort_letters", **arguments)
        yield answer, Expected((*names, place, "Nothing was changed"), cause, ("Fix", "Did you mean", "There are:"))

    return Case(_OWNER, title, play, own=True)


_LOCKS = "locks:\n  - field: {field}\n    {limit}\n    reason: because\n"
CASES: list[Case] = [
    _owner("locks.yaml does not parse", "locks.yaml", "locks: [", (), ("not valid YAML",)),
    _owner("locks.yaml with a misspelt key", "locks.yaml", "lockz: []", ("lockz",), ("no key",)),
    _owner(
        "a lock of a field that is not there",
        "locks.yaml",
        _LOCKS.format(field="optimizer.learning_rat", limit="max: 1"),
        ("optimizer.learning_rat",),
        ("no field",),
    ),
    _owner("locks.yaml that is no text", "locks.yaml", b"\xff\xfe\x00", (), ("cannot be read",)),
    _owner("settings.yaml with an unknown key", "settings.yaml", "variable: {}", ("variable",), ("no key",)),
    _owner("settings.yaml with a wrong type", "settings.yaml", "environments: 7", ("environments",), ("list",)),
    _owner("settings.yaml that names no preset", "settings.yaml", "preset: fast", ("fast",), ("no preset",)),
    _owner(
        "a preset with an unknown field",
        "presets/mine.yaml",
        "config: {optimizer: {learning_rat: 1}}",
        ("learning_rat",),
        ("no key",),
    ),
    _owner(
        "a preset with a wrong value",
        "presets/mine.yaml",
        "config: {rollout: {group_size: one}}",
        ("rollout.group_size", "one"),
        ("is not a whole number",),
    ),
]
