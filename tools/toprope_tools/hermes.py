"""The ten RL tools of Hermes Agent, under its parameters and result fields, for skills and prompts that exist.

Each is a few calls of our own tools, so the owner's locks, limits and confirmations hold as they do there. Hermes keeps
one selected environment; here each client has its own, a draft. Results are the JSON objects that Hermes returned:
https://github.com/NousResearch/hermes-agent, tools/rl_training_tool.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from toprope.analysis.findings.diagnosis import told
from toprope.analysis.findings.rules import after_end
from toprope.analysis.reports.report import trackers_of
from toprope.errors import InvalidValue, NotFound, NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import LIVE, Status
from toprope.settings.fields import KNOBS, Field, get_value
from toprope.text_format import call, clip, cut, plural
from toprope.untrusted import marked
from toprope.workbench.drafts import Draft
from toprope_tools.answers.answer import TOKEN_BUDGET
from toprope_tools.clients import LONGEST_S, UNKNOWN, Client
from toprope_tools.openings import CALLER, Caller
from toprope_tools.planning import config as drafts
from toprope_tools.planning import environments
from toprope_tools.results import results
from toprope_tools.runs import inference, training
from toprope_tools.status import status as states
from toprope_tools.status.status_text import components
from toprope_tools.status.wait import Progress

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

FIELDS: Mapping[str, str] = {
    "group_size": "rollout.group_size",
    "max_token_length": "rollout.max_new_tokens",
    "max_num_workers": "rollout.concurrency",
    "max_batches_offpolicy": "rollout.max_staleness",
    "worker_timeout": "environment.call_timeout_s",
    "total_steps": "budget.steps",
    "steps_per_eval": "evaluation.every_steps",
    "use_wandb": "logging.wandb",
    "wandb_project": "logging.wandb_project",
    "tokenizer_name": "policy.model",
    "lora_rank": "policy.lora_rank",
    "max_token_trainer_length": "policy.max_context",
    "learning_rate": "optimizer.learning_rate",
    "save_checkpoint_interval": "logging.save_steps",
}
"""Field of Hermes -> ours. `batch_size` counts answers there and groups here (`rollout.groups_per_step`)."""
_BATCH, _WANDB = "batch_size", "use_wandb"
_STATES = {"queued": "pending", "validating": "starting", "lost": "failed"}
_RUNNING = frozenset({"training", "evaluating", "paused"})
_PROCESSES = {"api": "api", "trainer": "trainer", "environment": "env"}
_MOST_RUNS, _SCALES = 100, {"small", "medium", "large"}


@dataclass
class Selection:
    """The environment that a client selected: a draft, and the tests of it that the client asked for."""

    draft_id: str
    tests: dict[str, str] = field(default_factory=dict)
    """Arguments and revision -> run."""
    starting: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while a test starts, so that an equal call waits for its run."""


def selected(workshop: Workshop, caller: str) -> Selection:
    """Return the selection of a client.

    Raises:
        NotPossibleNow: It selected nothing since the server started.
    """
    selection: Selection | None = workshop.selections.get(caller)
    if selection is None:
        raise NotPossibleNow("No environment selected.", hint="Use rl_select_environment(name) first.")
    return selection


async def rl_list_environments(workshop: Workshop) -> dict[str, Any]:
    """List all environments that can be opened, with descriptions as long as fit."""
    entries = [entry for entry in await to_thread.run_sync(workshop.catalog.entries) if entry.usable]
    for length in (100, 40, 0):
        listed = [
            {
                "name": entry.name,
                "class_name": entry.environment.attribute or entry.ecosystem,
                "file_path": entry.environment.place,
                "description": marked(entry.description, length) if length else "",
            }
            for entry in entries
        ]
        if len(json.dumps(listed)) // 4 < TOKEN_BUDGET - 500:
            break
    tips = ["rl_select_environment(name) selects one.", "Its file shows tasks and scoring."]
    return {"environments": listed, "count": len(listed), "tips": tips}


async def rl_select_environment(workshop: Workshop, who: str, *, name: str, caller: Caller = CALLER) -> dict[str, Any]:
    """Make a draft and select it for a client. Raises: see `toprope_tools.planning.environments`."""
    answer = await environments.select_environment(workshop, name=name, caller=caller)
    draft = await to_thread.run_sync(workshop.drafts.get, answer.data.model_dump()["draft_id"])
    workshop.selections[who] = Selection(draft.id)
    return {
        "message": f"Selected environment: {draft.environment.name}",
        "environment": draft.environment.name,
        "file_path": draft.environment.place,
        "draft_id": draft.id,
    }


async def rl_get_current_config(workshop: Workshop, who: str) -> dict[str, Any]:
    """Tell the selected draft's fields under Hermes' names, and its knobs."""
    draft = await _draft(workshop, who)
    locks = workshop.home.locks(draft.preset)
    free, locked = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, ours in _fields(draft).items():
        field_entry = {
            "name": name,
            "type": "integer" if name == _BATCH else "boolean" if name == _WANDB else ours.type_text,
            "default": _value_for_hermes(name, ours.default, draft),
            "description": (marked if ours.name.startswith(f"{KNOBS}.") else clip)(ours.description, 120),
            "current_value": _value_for_hermes(name, get_value(draft.config, ours), draft),
        }
        if (lock := locks.get(ours.name)) is None:
            free.append(field_entry)
        else:
            locked_value = lock.value if lock.min is None and lock.max is None else lock.says
            locked.append(
                {**field_entry, "locked_value": _value_for_hermes(name, locked_value, draft), "reason": lock.reason}
            )
    return {
        "environment": draft.environment.name,
        "configurable_fields": free,
        "locked_fields": locked,
        "tip": "Use rl_edit_config(field, value); it takes these fields and all of get_config (rollout.temperature).",
    }


async def rl_edit_config(workshop: Workshop, who: str, *, field: str, value: Any) -> dict[str, Any]:
    """Change one field of the selected draft.

    Raises:
        NotFound: There is no such field; the message names those there are.
        LockedField, InvalidValue: The value is not allowed.
    """
    draft = await _draft(workshop, who)
    fields = _fields(draft)
    ours = fields[field].name if field in fields else field
    if ours not in draft.fields:
        raise NotFound(f"Unknown field '{clip(field, 80)}'.", hint=f"Available fields: {', '.join(fields)}.")
    our_value = value
    if field in (_WANDB, _BATCH) and isinstance(value, str):  # as clients send numbers and booleans
        with suppress(ValueError, RecursionError):
            our_value = json.loads(value.lower())
    if field == _WANDB and isinstance(our_value, bool):
        our_value = "online" if our_value else "disabled"
    elif field == _BATCH:
        size = draft.config.rollout.group_size
        if isinstance(our_value, bool) or not isinstance(our_value, int) or our_value < size or our_value % size:
            raise InvalidValue(
                f"batch_size {clip(str(value), 40)} is not a multiple of group_size {size}.",
                hint="A step takes whole groups; set group_size first.",
            )
        our_value //= size
    await drafts.edit_config(workshop, draft_id=draft.id, changes={ours: our_value})
    changed = await _draft(workshop, who)
    current_config = _values(changed)
    message = f"Updated {field} = {cut(value, 200)}"
    if changed.config.rollout.group_size != draft.config.rollout.group_size:
        groups = plural(changed.config.rollout.groups_per_step, "group")
        message += f"; {_BATCH} is now {current_config[_BATCH]}, because a step takes {groups}"
    return {"message": message, "field": field, "value": value, "config": current_config}


async def rl_start_training(
    workshop: Workshop, who: str, *, again: bool = False, agreed: str | None = None
) -> dict[str, Any]:
    """Start training from the selected draft. See `toprope_tools.runs.training.start_training`."""
    draft = await _draft(workshop, who)
    try:
        answer = await training.start_training(workshop, draft_id=draft.id, again=again, agreed=agreed)
    except NotPossibleNow as refused:
        if call("start_training", draft_id=draft.id, again=True) in refused.hint:
            refused.hint = "rl_check_status follows it; rl_start_training(again=true) starts another beside it."
        raise
    run_id = str(answer.data.model_dump()["run_id"])
    folder = workshop.runs.folder(run_id)
    return {
        "run_id": run_id,
        "status": "starting",
        "environment": draft.environment.name,
        "config": _values(draft),
        **_tracker(folder),
        "config_path": str(folder.spec),
        "logs": _logs(folder),
        "message": "Training starting. Use rl_check_status(run_id) to monitor.",
        "warnings": [line for line in answer.text.splitlines() if line.startswith("Warning (")],
    }


async def rl_check_status(workshop: Workshop, *, run_id: str, client: Client = UNKNOWN) -> dict[str, Any]:
    """Tell a run's state and metrics, or that nothing is new before its interval is over.

    Raises:
        NotFound: There is no such run.
    """
    run = (await states.check_status(workshop, run_ids=[run_id], client=client)).data.model_dump()["runs"][0]
    news = run["fresh"] or run["states"] or run["events"]
    if run["state"] in LIVE and not news and run["next_numbers_in_s"]:
        seconds_left = run["next_numbers_in_s"]
        return {
            "rate_limited": True,
            "run_id": run_id,
            "message": f"Rate limited. Next check available in {seconds_left / 60:.1f} minutes.",
            "next_check_in_seconds": seconds_left,
        }
    status = await to_thread.run_sync(workshop.runs.status, run_id)
    folder, numbers = workshop.runs.folder(run_id), run["numbers"]
    began = status.training_at or status.started_at
    evaluations = [evaluation.get("accuracy") for evaluation in status.evaluations.values()]
    report = {
        "run_id": run_id,
        "status": _state(status),
        "environment": status.environment,
        "running_time_minutes": round(((status.ended_at or time.time()) - began) / 60, 2) if began else 0,
        "processes": {_PROCESSES[name]: state for name, state in components(status).items() if name in _PROCESSES},
        **_tracker(folder),
        "logs": _logs(folder),
        "metrics": {
            "step": numbers.get("step", 0),
            "reward_mean": numbers.get("reward"),
            "percent_correct": numbers.get("success"),
            "eval_percent_correct": evaluations[-1] if evaluations else None,
        },
        "findings": _findings(status),
    }
    return report if status.failure is None else {**report, "error": marked(status.failure.reason, 400)}


async def rl_stop_training(workshop: Workshop, *, run_id: str) -> dict[str, Any]:
    """Stop a run, or say that it is not running.

    Raises:
        NotFound: There is no such run.
    """
    stopped = (await training.stop_training(workshop, run_id=run_id)).data.model_dump()
    if not stopped["was_live"]:
        return {"message": f"Run '{run_id}' is not running (status: {stopped['state']})"}
    return {"message": f"Stopped training run '{run_id}'", "run_id": run_id, "status": stopped["state"]}


async def rl_get_results(workshop: Workshop, *, run_id: str) -> dict[str, Any]:
    """Tell a run's last metrics, its history in ten rows, and its weights.

    Raises:
        NotFound: There is no such run.
        InvalidValue: A seed group.
    """
    answer = (await results.get_results(workshop, run_id=run_id, detail="detailed")).data.model_dump()
    run_results, history = answer["results"], answer["detail"].get("history", [])
    status = await to_thread.run_sync(workshop.runs.status, run_id)
    final = {key: metric for key, metric in run_results.get("metrics", {}).items() if isinstance(metric, int | float)}
    for label, evaluation in run_results.get("evaluations", {}).items():
        if evaluation.get("sampled"):
            final[f"eval/{label}/percent_correct"] = evaluation["sampled"]["accuracy"]
    return {
        "run_id": run_id,
        "status": _state(status),
        "environment": status.environment,
        **_tracker(workshop.runs.folder(run_id)),
        "final_metrics": final,
        "history": history[::-1][:: max(1, -(-len(history) // 10))][::-1],
        "weights": run_results.get("weights"),
        "checkpoint": run_results.get("checkpoint"),
        "findings": _findings(status),
    }


async def rl_list_runs(workshop: Workshop) -> dict[str, Any]:
    """List the newest runs."""
    statuses = await to_thread.run_sync(workshop.statuses)
    runs = [
        {"run_id": one.run_id, "environment": one.environment, "status": _state(one), "wandb_run_name": one.run_id}
        for one in statuses[:_MOST_RUNS]
    ]
    return {"runs": runs, "count": len(statuses)}


async def rl_test_inference(
    workshop: Workshop,
    who: str,
    *,
    num_steps: int = 3,
    group_size: int = 16,
    models: list[str] | None = None,
    client: Client = UNKNOWN,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure models on tasks of the selected environment and wait as long as the client may.

    Args:
        num_steps: Tasks.
        group_size: Answers to each.
        models: Ids at OpenRouter (VENDOR/MODEL), or names as our own tool takes them; Hermes' three if None.

    Raises:
        NotFound, LockedField, InvalidValue: As `toprope_tools.runs.inference.test_inference`.
    """
    draft, mine = await _draft(workshop, who), selected(workshop, who)
    names = [
        f"openrouter:{name}" if "/" in name and ":" not in name.partition("/")[0] else name for name in models or []
    ]
    key = json.dumps([draft.revision, num_steps, group_size, names])
    async with mine.starting:
        if key not in mine.tests:
            answer = await inference.test_inference(
                workshop, draft_id=draft.id, models=names or ["hermes"], tasks=num_steps, group_size=group_size
            )
            mine.tests[key] = str(answer.data.model_dump()["run_id"])
        run_id = mine.tests[key]
    await states.check_status(
        workshop, run_ids=[run_id], wait_s=LONGEST_S, until=["end"], client=client, progress=progress
    )
    status = await to_thread.run_sync(workshop.runs.status, run_id)
    plan = {"num_steps": num_steps, "group_size": group_size, "rollouts_per_model": num_steps * group_size}
    report: dict[str, Any] = {
        "run_id": run_id,
        "environment": draft.environment.name,
        "environment_file": draft.environment.place,
        "test_config": plan,
    }
    if not status.ended:
        return report | {"status": "running", "message": "Call rl_test_inference with the same arguments to wait on."}
    if mine.tests.get(key) == run_id:  # an equal call may have told the end before
        del mine.tests[key]  # the next call measures again
    run_results = (await results.get_results(workshop, run_id=run_id, detail="detailed")).data.model_dump()["results"]
    tested = [_tested(model) for model in (run_results.get("tested") or {}).get("models", [])]
    if status.failure is not None:
        report |= {"error": marked(status.failure.reason, 400)}
    plan["total_rollouts"] = num_steps * group_size * len(tested)
    working = [result for result in tested if result["steps_tested"]]
    best = max(working, key=lambda result: float(result["accuracy"]), default=None)
    mean = sum(result["accuracy"] for result in working) / len(working) if working else 0
    summary = {
        "steps_requested": num_steps,
        "models_tested": len(tested),
        "models_succeeded": len(working),
        "best_model": best and best["model"],
        "avg_accuracy": round(mean, 3),
        "environment_working": bool(working),
        "output_directory": str(workshop.runs.folder(run_id).path),
    }
    return report | {"models_tested": tested, "summary": summary}


def _tested(model: Mapping[str, Any]) -> dict[str, Any]:
    """One model's result. Hermes counts an answer as correct if its score is above 0.

    A step without scores is left out; errors have no scores, but count as answers that are not correct.
    """
    steps = [
        {"step": number, "completions": len(scores), "correct": sum(score > 0 for score in scores), "scores": scores}
        for number, scores in enumerate(model.get("scores", []), 1)
        if scores
    ]
    measured = model.get("measured") or {"rollouts": 0, "tasks": 0}
    answered, tasks, right = measured["rollouts"], measured["tasks"], sum(step["correct"] for step in steps)
    solved, scale = sum(step["correct"] > 0 for step in steps), model["name"].rpartition("/")[2]
    result = {
        "model": model["model"],
        "name": model["name"],
        "scale": scale if scale in _SCALES else "custom",
        "steps": steps,
        "steps_tested": len(steps),
        "total_completions": answered,
        "correct_completions": right,
        "accuracy": round(right / answered, 3) if answered else 0,
        "steps_with_correct": solved,
        "step_success_rate": round(solved / tasks, 3) if tasks else 0,
    }
    return result if model.get("error") is None else {**result, "error": marked(model["error"], 400)}


async def _draft(workshop: Workshop, who: str) -> Draft:
    return await to_thread.run_sync(workshop.drafts.get, selected(workshop, who).draft_id)


def _fields(draft: Draft) -> dict[str, Field]:
    """The fields of a draft by Hermes' names, and its knobs by their own."""
    hermes_fields = {name: draft.fields[ours] for name, ours in FIELDS.items()}
    meaning = "Answers per optimizer step, in whole groups of group_size."
    hermes_fields[_BATCH] = replace(draft.fields["rollout.groups_per_step"], description=meaning)
    knobs = {
        name.removeprefix(f"{KNOBS}."): knob for name, knob in draft.fields.items() if name.startswith(f"{KNOBS}.")
    }
    return {**knobs, **hermes_fields}


def _values(draft: Draft) -> dict[str, Any]:
    return {
        name: _value_for_hermes(name, get_value(draft.config, ours), draft) for name, ours in _fields(draft).items()
    }


def _value_for_hermes(name: str, value: Any, draft: Draft) -> Any:
    if name == "use_wandb":
        return value != "disabled"
    if name == _BATCH and isinstance(value, int):
        return value * draft.config.rollout.group_size
    return cut(value, 200)


def _state(status: Status) -> str:
    return "running" if status.state in _RUNNING else _STATES.get(status.state, status.state)


def _findings(status: Status) -> list[dict[str, str]]:
    """The present findings: rule, level, and what to know and to do."""
    return [
        {"rule": clip(one.rule, 80), "level": one.level, "what": told(one.rule, one.what, 240)}
        | {"next": told(one.rule, after_end(one.next) if status.ended else one.next, 240)}
        for one in status.findings
    ]


def _logs(folder: RunFolder) -> dict[str, str]:
    return {short: str(folder.log(name)) for name, short in _PROCESSES.items()}


def _tracker(folder: RunFolder) -> dict[str, Any]:
    logging = Specification.read(folder).config.logging
    url = trackers_of(folder).get("wandb", {}).get("url")
    return {
        "wandb_project": logging.wandb_project,
        "wandb_run_name": folder.run_id,
        **({"wandb_url": clip(str(url), 300)} if url else {}),
    }
