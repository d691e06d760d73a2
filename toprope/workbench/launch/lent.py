"""The models, tools and data that the owner lends, as they are now.

Specifications hold models with their prices and the trainer's class, and the targets of `orchestrator` and of data sets
hold what the owner allowed when a draft was made or a run began. What the owner has withdrawn since must not be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.errors import LockedField, NotFound, NotPossibleNow, shown
from toprope.records.run.specification import ORCHESTRATOR, EnvironmentSource, Specification
from toprope.sdk.adapters._shared.rows import HUB, allowed_file
from toprope.sdk.errors import InvalidRequest
from toprope.settings.owner import Home
from toprope.settings.sections.environment import members_of
from toprope.settings.tools import tool_variable
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.endpoints import require_keys, resolve_helpers, resolve_models, resolve_teacher
from toprope.workbench.launch.custom_trainers import trainer_of
from toprope.workbench.launch.hosted import with_service

_LENDING = ("dataset", ORCHESTRATOR)
"""Adapters whose targets hold the owner's permissions."""
_PERMISSIONS = ("folders", "files", "tools")


def renewed(specifications: Sequence[Specification], home: Home) -> list[Specification]:
    """Return specifications with the models, the trainer, the tools and the folders that the owner lends now.

    Args:
        specifications: Of runs that differ in their seed alone.
        home: The owner's.

    Raises:
        LockedField: They use a tool or a file that the owner has withdrawn.
        NotFound, InvalidValue: The same of a model, its key or the trainer.
        NotPossibleNow: The environment is gone.
    """
    specifications = [_with_models(specification, home) for specification in specifications]
    first = specifications[0]
    sources = [first.environment, *first.mixture]
    if first.ask is not None or not any(map(_permissions_of, sources)):
        return list(specifications)
    catalog, plans = Catalog.of_home(home), members_of(first.config.environment)
    environment, *mixture = [
        _renew(source, plan.section.knobs, catalog) if _permissions_of(source) else source
        for source, plan in zip(sources, plans, strict=True)
    ]
    return [
        specification.model_copy(update={"environment": environment, "mixture": mixture})
        for specification in specifications
    ]


def _with_models(run: Specification, home: Home) -> Specification:
    if run.ask is not None:
        return run
    settings, presets, file = home.settings(), home.preset_folders, home.settings_file
    found: dict[str, Any] = {}
    if run.test is not None and run.test.models:
        models = resolve_models([model.name for model in run.test.models], settings, presets)
        require_keys(models, settings, file)
        found["test"] = run.test.model_copy(update={"models": models})
    if run.teacher is not None:
        found["teacher"] = resolve_teacher(run.teacher.name, settings, presets, file)
    if run.helpers:
        found["helpers"] = resolve_helpers(run.config.environment, settings, presets, file)
    if run.trainer is not None:
        trainer = trainer_of(run.config, home.trainer_folders(settings), file)
        found |= {"trainer": trainer} if trainer is None or trainer.file != run.trainer.file else {}
    run = run.model_copy(update=found)
    return with_service(run, settings) if run.config.is_hosted else run


def tool_variables(run: Specification, home: Home) -> dict[str, str]:
    """Return the variables of the lent tools that a run uses, for its driver; no specification holds them.

    Raises:
        LockedField: settings.yaml lacks a variable of a tool that the run uses.
    """
    sources, settings = [run.environment, *run.mixture], home.settings()
    if run.ask is not None or all(source.adapter != ORCHESTRATOR for source in sources):
        return {}
    variables: dict[str, str] = {}
    for source, plan in zip(sources, members_of(run.config.environment), strict=True):
        if source.adapter != ORCHESTRATOR:
            continue
        tools, used = _permissions_of(source).get("tools", {}), source.tools_in(*plan.knob_sets)
        variables |= settings.variables_of_tools(used)
        for tool in sorted(used):
            for name in tools.get(tool, {}).get("variables", ()):
                if tool_variable(tool, name) not in variables:
                    raise LockedField(
                        f"{source.name}: the tool {shown(tool)} needs the variable {name}, which the owner's settings "
                        "do not have any more.",
                        hint=f"The owner puts it into {home.settings_file}: "
                        f"tools: {{{tool}: {{variables: {{{name}: <its value>}}}}}}.",
                    )
    return variables


def _permissions_of(source: EnvironmentSource) -> dict[str, Any]:
    """Return what the owner allowed an environment; empty for those that take no permissions."""
    target = json.loads(source.target or "{}") if source.adapter in _LENDING else {}
    return target if any(target.get(key) for key in _PERMISSIONS) else {}


def _renew(source: EnvironmentSource, knobs: Mapping[str, Any], catalog: Catalog) -> EnvironmentSource:
    try:
        entry = catalog.lent(source.name)
    except NotFound as gone:
        # Perhaps for a moment only: its folder is not mounted yet, or its file is being edited.
        raise NotPossibleNow(f"{gone.message} The owner has removed it.", hint=gone.hint) from None
    now = entry.environment
    if now.adapter != source.adapter or not entry.usable:
        raise NotPossibleNow(
            f"{source.name} is not what it was: {entry.problem.rstrip('.') or 'the owner put another in its place'}.",
            hint="select_environment makes a draft of what it is now.",
        )
    if now.target == source.target:
        return source
    former, lent = _permissions_of(source), _permissions_of(now)
    for tool in knobs.get("tools") or ():
        is_made_up = tool == "web_search" and knobs.get("facts")
        if tool in former.get("tools", {}) and tool not in lent.get("tools", {}) and not is_made_up:
            raise LockedField(
                f"{source.name}: the owner does not lend the tool {shown(tool)} any more.",
                hint="edit_config takes it out of environment.knobs.tools, or ask the owner.",
            )
    path = str(knobs.get("path") or former.get("knobs", {}).get("path") or "")
    if path and not path.startswith(HUB) and _may_read(former, path) and not _may_read(lent, path):
        raise LockedField(
            f"{source.name}: the owner does not lend {shown(path)} any more.",
            hint="edit_config names another file in environment.knobs.path, or ask the owner.",
        )
    return source.model_copy(update={"target": now.target})


def _may_read(target: Mapping[str, Any], path: str) -> bool:
    """Return True if a target lets an environment read a file."""
    folders, files = ([Path(allowed) for allowed in target.get(key, ())] for key in ("folders", "files"))
    try:
        allowed_file(path, folders, files)
    except (InvalidRequest, OSError, RuntimeError, ValueError):
        return False
    return True
