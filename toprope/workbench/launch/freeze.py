"""Freezing: from a draft to a specification that never changes again.

This is the one place where the owner's locks are enforced. A value may have come by an edit, a preset, a database that
somebody touched, or a lock may be newer than the draft: what the owner does not allow does not run.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Literal

import toprope
from toprope.errors import InvalidValue
from toprope.records.run.specification import AskPlan, ModelUnderTest, Specification, SweepPlan, TestPlan, TrainerSource
from toprope.settings.changes import apply
from toprope.settings.environment import curriculum_of
from toprope.settings.fields import KNOBS, all_fields, knob_problems
from toprope.settings.locks import Locks
from toprope.workbench.drafts import Draft
from toprope.workbench.launch.mixture_sources import Ingredients, hold_locks

__all__ = ["freeze", "freeze_question", "new_run_id"]

_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"


def new_run_id(name: str, now: float | None = None) -> str:
    """A readable id that is free with all but certainty: `spell-backward-261121-0158-k7f3` (local time).

    Args:
        name: The environment's name or one that an agent chose; its last part is used, shortened.
        now: Seconds since the epoch.
    """
    short = re.sub(r"[^a-z0-9]+", "-", name.rsplit("/", 1)[-1].lower()).strip("-")[:32].strip("-") or "run"
    stamp = time.strftime("%y%m%d-%H%M", time.localtime(now))
    return f"{short}-{stamp}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"


def freeze(
    draft: Draft,
    locks: Locks,
    *,
    kind: Literal["train", "sft", "test", "ask", "sweep"],
    policy_cache: str,
    name: str | None = None,
    test: TestPlan | None = None,
    ask: AskPlan | None = None,
    sweep: SweepPlan | None = None,
    teacher: ModelUnderTest | None = None,
    trainer: TrainerSource | None = None,
    base: tuple[str, str] | None = None,
    ingredients: Ingredients | None = None,
    now: float | None = None,
) -> Specification:
    """The specification of a run that is to start from a draft.

    Args:
        draft: What to run; its configuration is copied.
        locks: The owner's, as they are now.
        kind: `train`, `sft`, `test`, `ask` or `sweep`, the last three with their plans.
        policy_cache: Folder under which embedded policies are kept.
        name: Begins the run's id instead of the environment's name.
        test: The plan of a run of kind `test`.
        ask: The plan of a run of kind `ask`.
        sweep: The plan of a run of kind `sweep`.
        teacher: Who demonstrates in a run of kind `sft`; None: the environment's own solver.
        trainer: Who trains, where it is a class of the owner's own.
        base: Where `policy.model` names a run: its id, and the folder of the weights that it left.
        ingredients: What its mixture and its reward functions are made of; may be left out where it has none.
        now: Seconds since the epoch; the clock where it is None.

    Raises:
        LockedField: The configuration is not what the owner allows.
        InvalidValue: Its fields do not fit each other, or a knob has a value that it cannot have.
    """
    now = time.time() if now is None else now
    fields = draft.fields
    locks.enforce(draft.config, fields)
    hold_locks(draft.config, locks)
    section = draft.config.environment
    if ingredients is None:
        if section.mixture or section.rewards:
            raise ValueError("a mixture and reward functions have to be found before they are frozen")
        ingredients = Ingredients(draft.environment)
    problems = draft.config.conflicts() + knob_problems(draft.config, fields)
    curriculum = curriculum_of(section.curriculum)
    moved = fields.get(f"{KNOBS}.{curriculum.knob}") if curriculum is not None else None
    for level in curriculum.levels if curriculum is not None and moved is not None else ():
        try:
            moved.coerce(level)
        except InvalidValue as problem:
            problems.append(f"environment.curriculum: {problem}")
    unknown = [knob for knob in draft.config.environment.knobs if f"{KNOBS}.{knob}" not in fields]
    problems += [f"{KNOBS}.{knob} is no setting of {draft.environment.name}." for knob in unknown]
    if problems:
        raise InvalidValue(
            f"{draft.id} cannot start: {' '.join(problems)}", hint="edit_config changes several fields at once."
        )
    if any((kind == name) != (plan is not None) for name, plan in (("test", test), ("ask", ask), ("sweep", sweep))):
        raise ValueError("runs of kinds test, ask and sweep have their plan, and no other has")
    config = draft.config.model_copy(deep=True)
    if base is not None:
        config.policy = config.policy.model_copy(update={"model": base[1], "revision": None})
    return Specification(
        run_id=new_run_id(name or draft.environment.name, now),
        kind=kind,
        created_at=now,
        toprope_version=toprope.__version__,
        draft_id=draft.id,
        draft_revision=draft.revision,
        preset=draft.preset,
        environment=ingredients.environment,
        mixture=ingredients.mixture,
        config=config,
        locks=locks.record(),
        test=test,
        ask=ask,
        sweep=sweep,
        teacher=teacher,
        trainer=trainer,
        base_run=base[0] if base else None,
        policy_cache=policy_cache,
    )


def freeze_question(
    run: Specification, model: str, locks: Locks, plan: AskPlan, now: float | None = None
) -> Specification:
    """The specification of a run that puts questions to what another run trained.

    The policy is that run's and stays so, whatever the owner locks for new training; what the asking takes of the
    machine (`launcher`, `rollout`) is moved to what the locks allow.

    Args:
        run: Which was trained.
        model: Folder of its weights.
        locks: The owner's, as they are now.
        plan: The questions.
        now: Seconds since the epoch; the clock where it is None.
    """
    now = time.time() if now is None else now
    config = run.config.model_copy(deep=True)
    fields = {name: field for name, field in all_fields().items() if name.startswith(("launcher.", "rollout."))}
    allowed, _ = locks.adjust(config, fields)
    config, _ = apply(config, allowed, (), locks)
    # The checkpoint holds the adapters, where there are any.
    config.policy = config.policy.model_copy(update={"model": model, "revision": None, "lora": False})
    return Specification(
        run_id=new_run_id(f"ask-{run.environment.name.rsplit('/', 1)[-1]}", now),
        kind="ask",
        created_at=now,
        toprope_version=toprope.__version__,
        draft_id=run.draft_id,
        draft_revision=run.draft_revision,
        preset=run.preset,
        environment=run.environment,
        config=config,
        locks=locks.record(),
        ask=plan,
        policy_cache=run.policy_cache,
    )
