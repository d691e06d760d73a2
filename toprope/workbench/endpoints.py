"""Which models at endpoints an agent may test, and how their keys get where they are needed and nowhere else.

The names are the owner's: entries under `models` in settings.yaml, or the models of a preset. An agent gives names,
never URLs. A key is taken from the owner's settings when a run starts, goes to that run's rollout driver under a name
that no worker inherits, and to nothing else; it is in no specification, log or result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from toprope.errors import InvalidValue, NotFound
from toprope.records.run.specification import ModelUnderTest, Specification
from toprope.records.run.tested_models import ENDPOINT_KEY
from toprope.settings.endpoints import BASE, Endpoint
from toprope.settings.owner import MODELS, OwnerSettings
from toprope.settings.presets import list_presets, load_preset
from toprope.settings.yamlfiles import nearest

__all__ = [
    "MOST_MODELS",
    "keys_for",
    "known_models",
    "require_keys",
    "resolve_models",
    "resolve_teacher",
    "variables_for",
]

MOST_MODELS = 8
_URLISH = ("://", "http:", "https:", "www.")


def known_models(settings: OwnerSettings, presets: Sequence[Path]) -> dict[str, dict[str, Endpoint]]:
    """What may be asked for, by the name to ask with: one model, or all of a preset, by their own names then."""
    found: dict[str, dict[str, Endpoint]] = {}
    for preset in list_presets(presets):
        try:
            models = load_preset(preset, presets).models
        except InvalidValue:
            continue  # a broken file; whoever selects it is told
        if models:
            whole = {f"{preset}/{name}": endpoint for name, endpoint in models.items()}
            found[preset] = whole
            found |= {name: {name: endpoint} for name, endpoint in whole.items()}
    return found | {name: {name: endpoint} for name, endpoint in settings.models.items()}


def resolve_models(names: Sequence[str], settings: OwnerSettings, presets: Sequence[Path]) -> list[ModelUnderTest]:
    """The models that an agent named, each once.

    Raises:
        InvalidValue: A name is a URL, there are too many, or none.
        NotFound: A name is nobody's.
    """
    known = known_models(settings, presets)
    found: dict[str, ModelUnderTest] = {}
    for name in names:
        if any(word in name.lower() for word in _URLISH):
            raise InvalidValue(
                "Models are asked for by names, not by URLs: the owner alone decides where tasks and keys are sent.",
                hint=f"Names: {', '.join([BASE, *known])}. The owner adds a model under `models` in settings.yaml: "
                "its base_url, model and the name of its key.",
            )
        if name == BASE:
            found[name] = ModelUnderTest(name=BASE)
        elif name in known:
            found |= {one: ModelUnderTest(name=one, endpoint=endpoint) for one, endpoint in known[name].items()}
        else:
            raise NotFound(
                f"There is no model {name!r}.",
                hint=f"{nearest(name, [BASE, *known])} {BASE!r} is the draft's own policy; the owner adds others "
                "under `models` in settings.yaml.",
            )
    if not 1 <= len(found) <= MOST_MODELS:
        raise InvalidValue(f"{len(found)} models were asked for.", hint=f"From 1 to {MOST_MODELS} at a time.")
    return list(found.values())


def resolve_teacher(name: str, settings: OwnerSettings, presets: Sequence[Path], file: Path) -> ModelUnderTest | None:
    """The model that demonstrates, None for the environment's own solver.

    Args:
        name: As `sft.teacher` names it.
        settings: The owner's.
        presets: The folders with presets.
        file: Where the owner's settings lie, for the message about a missing key.

    Raises:
        InvalidValue, NotFound: It is nobody's name, several models', or its key is missing.
    """
    if name == "solver":
        return None
    models = resolve_models([name], settings, presets)
    if len(models) != 1 or models[0].endpoint is None:
        raise InvalidValue(f"sft.teacher is {name!r}, which is no single model.", hint="Name one, or 'solver'.")
    require_keys(models, settings, file)
    return models[0]


def require_keys(models: Sequence[ModelUnderTest], settings: OwnerSettings, settings_file: Path) -> None:
    """Passes when every key that these models need is there.

    Raises:
        InvalidValue: One is missing; the message says where it belongs.
    """
    missing: dict[str, list[str]] = {}
    for model in models:
        if model.endpoint is not None and model.endpoint.key and _key(model.endpoint.key, settings, os.environ) is None:
            missing.setdefault(model.endpoint.key, []).append(model.name)
    if missing:
        names = "; ".join(f"{key} for {', '.join(named)}" for key, named in missing.items())
        first = next(iter(missing))
        raise InvalidValue(
            f"A key is missing: {names}. Nothing was sent or started.",
            hint=f"The owner puts it into {settings_file}: variables: {{{MODELS}: {{{first}: <the key>}}}}. Until then "
            f'test_inference(models=["{BASE}"]) measures the draft\'s own policy without any key.',
        )


def keys_for(models: Sequence[ModelUnderTest], settings: OwnerSettings) -> dict[str, str]:
    """The keys of these models by their names, as far as there are any; for a process that asks them, and no file."""
    names = {model.endpoint.key for model in models if model.endpoint is not None and model.endpoint.key}
    found = {name: _key(name, settings, os.environ) for name in sorted(names)}
    return {name: key for name, key in found.items() if key is not None}


def variables_for(
    specification: Specification,
    settings: OwnerSettings,
    presets: Sequence[Path],
    surroundings: Mapping[str, str] | None = None,
) -> dict[str, dict[str, str]]:
    """The owner's variables for the crew of one run: with the keys of the models that it tests, for its driver alone,
    and without every other key of a model.

    Args:
        specification: The run's.
        settings: The owner's.
        presets: The folders with presets, which name keys as well.
        surroundings: Where keys may stand that the settings do not have; this process's variables when None.
    """
    surroundings = os.environ if surroundings is None else surroundings
    models = list(specification.test.models) if specification.test else []
    models += [specification.teacher] if specification.teacher else []
    needed = {model.endpoint.key for model in models if model.endpoint is not None and model.endpoint.key}
    of_models = needed | set(settings.variables.get(MODELS, {}))
    for models_of in known_models(settings, presets).values():
        of_models |= {endpoint.key for endpoint in models_of.values() if endpoint.key}
    given = {component: dict(values) for component, values in settings.variables.items() if component != MODELS}
    for name in of_models:
        given.get("*", {}).pop(name, None)
    for name in sorted(needed):
        if (value := _key(name, settings, surroundings)) is not None:
            given.setdefault("environment", {})[f"{ENDPOINT_KEY}{name}"] = value
    return given


def _key(name: str, settings: OwnerSettings, surroundings: Mapping[str, str]) -> str | None:
    for recipient in (MODELS, "*", "environment"):
        if value := settings.variables.get(recipient, {}).get(name):
            return value
    return surroundings.get(name) or None
