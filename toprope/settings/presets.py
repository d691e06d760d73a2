"""Presets: starting points for a draft, as YAML overlays of the configuration.

    description: One line for list and answer.
    config:                      # sections and fields of the schema; what is not named keeps its default
      rollout: {group_size: 8}
    environments:                # an environment's own settings under this preset
      reasoning_gym/spell_backward: {min_word_len: 3}
    models:                      # models at endpoints, for test_inference(models=["<preset>"])
      small: {base_url: "https://...", model: vendor/name, key: SOME_API_KEY}
    locks:                       # as in locks.yaml, for drafts of this preset alone
      - {field: policy.lora_rank, value: 32, reason: The recipe is for this rank.}

The owner's folder comes first, so an owner can replace a shipped preset by one of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue, NotFound, shown
from toprope.settings.endpoints import Endpoint, parse_endpoints
from toprope.settings.fields import KNOBS, all_fields, find_field
from toprope.settings.locks import Lock, Locks, parse_locks
from toprope.settings.schema import SECTIONS, Config
from toprope.settings.sections.algorithms import implied_fields
from toprope.settings.yamlfiles import check_keys, nearest, read_yaml


@dataclass(frozen=True)
class Preset:
    """A named overlay: field values by dotted name, and knobs by environment."""

    name: str
    description: str
    values: dict[str, Any]
    environments: dict[str, dict[str, Any]]
    models: dict[str, Endpoint] = field(default_factory=dict)
    locks: tuple[Lock, ...] = ()
    """Locks that hold for its drafts and runs, below the owner's own."""

    def config(self, environment: str) -> Config:
        """The configuration of a draft of an environment under this preset, before the owner's locks."""
        data = Config().model_dump()
        for name, value in {**self.values, **implied_fields(self.values)}.items():
            section, _, field = name.partition(".")
            data[section][field] = value
        data["environment"]["name"] = environment
        return Config.model_validate(data)

    def knobs(self, environment: str) -> dict[str, Any]:
        """The environment's own settings under this preset."""
        return dict(self.environments.get(environment, {}))


def list_presets(folders: Sequence[Path]) -> dict[str, Path]:
    """Files of presets by name; an earlier folder wins."""
    files: dict[str, Path] = {}
    for folder in folders:
        if folder.is_dir():
            for path in sorted(folder.glob("*.yaml")):
                files.setdefault(path.stem, path)
    return files


def load_preset(name: str, folders: Sequence[Path]) -> Preset:
    """The preset of that name.

    Raises:
        NotFound: No preset has it; the message names the nearest.
        InvalidValue: Its file is wrong.
    """
    files = list_presets(folders)
    if name not in files:
        raise NotFound(f"There is no preset {shown(name)}. Presets: {', '.join(files)}.", hint=nearest(name, files))
    path = files[name]
    data = check_keys(read_yaml(path), ("description", "config", "environments", "models", "locks"), str(path))
    sections = check_keys(data.get("config") or {}, SECTIONS, f"{path}, config")
    fields = all_fields()
    values = {}
    for section, entries in sections.items():
        names = [field_name.partition(".")[2] for field_name in fields if field_name.startswith(f"{section}.")]
        for key, value in check_keys(entries or {}, names, f"{path}, config.{section}").items():
            try:
                values[f"{section}.{key}"] = find_field(f"{section}.{key}", fields).coerce(value)
            except InvalidValue as problem:
                raise InvalidValue(f"{path}: {problem}", hint="Fix the file.") from None
    if "environment.name" in values:
        raise InvalidValue(f"{path}: a preset does not name the environment; select_environment does.")
    environments = data.get("environments") or {}
    for environment, knobs in environments.items() if isinstance(environments, dict) else [("environments", None)]:
        if not isinstance(knobs, dict) or not all(isinstance(key, str) for key in knobs):
            raise InvalidValue(f"{path}: {environment} must be a mapping of {KNOBS} to values.")
    models = parse_endpoints(data.get("models"), f"{path}, models")
    locks = tuple(parse_locks(data.get("locks"), f"{path}, locks").values())
    preset = Preset(name, str(data.get("description") or ""), values, environments, models, locks)
    if conflicts := preset.config("").conflicts():
        raise InvalidValue(f"{path}: {' '.join(conflicts)}")
    return preset


def locks_under(locks: Locks, preset: str | None, folders: Sequence[Path]) -> Locks:
    """The owner's locks with those of a preset below them; the owner's alone if there is no such preset any more.

    Raises:
        InvalidValue: The preset's file is wrong.
    """
    if not preset or preset not in list_presets(folders):
        return locks
    return locks.under(load_preset(preset, folders).locks)
