"""The fields of a configuration that the parameters of tools set, beside edit_config.

A parameter that sets a field is another way to its value, so the owner's lock on the field holds it, too
(`toprope.settings.locks.Locks.require`). Every parameter of every tool is listed here: a test refuses one that is not,
and attacks each that sets a field.
"""

from __future__ import annotations

from collections.abc import Mapping

SETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "select_environment": {"name": ("environment.name",), "preset": ("*",), "knobs": ("environment.knobs.*",)},
    "describe_environment": {"knobs": ("environment.knobs.*",)},
    "check_environment": {"name": ("environment.*",), "knobs": ("environment.knobs.*",)},
    "edit_config": {"changes": ("*",)},
    "undo_edit": {"revision": ("*",)},
    "fork_config": {"run_id": ("*",)},
    "reproduce_run": {"run_id": ("*",)},
    "resume_training": {
        "run_id": ("*",),
        "steps": ("budget.steps",),
        "seconds": ("budget.max_train_seconds",),
    },
    "start_training": {"draft_id": ("*",), "seeds": ("algorithm.seed",)},
    "start_sweep": {"draft_id": ("*",), "space": ("*",), "options": ("budget.steps",)},
    "test_inference": {
        "draft_id": ("*",),
        "tasks": ("evaluation.validation_tasks",),
        "group_size": ("rollout.group_size",),
        "max_new_tokens": ("rollout.max_new_tokens",),
    },
    "ask_checkpoint": {
        "draft_id": ("*",),
        "run_id": ("launcher.*", "rollout.*"),
        "temperature": ("rollout.temperature",),
        "max_new_tokens": ("rollout.max_new_tokens",),
        "count": ("rollout.group_size",),
    },
    "evaluate_policy": {"run_id": ("launcher.*", "rollout.*")},
    "serve_policy": {"run_id": ("launcher.*", "rollout.*")},
    "build_dataset": {
        "recipe": (
            *("sft.teacher", "sft.temperature", "sft.max_new_tokens"),
            *("environment.name", "environment.knobs.*", "environment.network", "environment.memory_mb"),
        )
    },
    "rl_select_environment": {"name": ("environment.name",)},
    "rl_edit_config": {"field": ("*",), "value": ("*",)},
    "rl_test_inference": {"num_steps": ("evaluation.validation_tasks",), "group_size": ("rollout.group_size",)},
}
"""Tool -> parameter -> fields; `*` stands for any, of a section or of all."""

SETS_NOTHING: Mapping[str, frozenset[str]] = {
    "list_environments": frozenset({"query", "cursor"}),
    "describe_environment": frozenset({"name"}),
    "check_environment": frozenset({"full"}),
    "add_environment": frozenset({"what"}),
    # It becomes a file that a later call names; the locks hold then.
    "save_environment": frozenset({"name", "code"}),
    "get_config": frozenset({"draft_id", "section"}),
    "edit_config": frozenset({"draft_id"}),
    "undo_edit": frozenset({"draft_id"}),
    "diff_config": frozenset({"a", "b"}),
    # Models are the owner's, by name, and no field names those of a test.
    "test_inference": frozenset({"models"}),
    "start_training": frozenset({"name", "again", "key", "preview", "confirm"}),
    # A strategy, a population and epochs decide how often the draft's fields are tried, within limits.yaml.
    "start_sweep": frozenset({"strategy", "population", "epochs"}),
    "stop_training": frozenset({"run_id"}),
    "list_runs": frozenset({"state", "query", "cursor"}),
    "check_status": frozenset({"run_ids", "wait_s", "until", "cursor"}),
    "get_results": frozenset({"run_id", "detail", "plot"}),
    "compare_runs": frozenset({"a", "b"}),
    "browse_rollouts": frozenset({"run_id", "order", "task", "part", "failed", "group", "cursor"}),
    # Tasks of installed packages, and time within limits.yaml.
    "evaluate_policy": frozenset({"tasks", "limit"}),
    "serve_policy": frozenset({"minutes"}),
    "export_policy": frozenset({"run_id", "form", "hub"}),
    "export_trajectories": frozenset({"sources", "format", "where"}),
    "build_dataset": frozenset({"name", "sources", "where"}),
    "ask_checkpoint": frozenset({"prompts"}),
    "read_logs": frozenset({"run_id", "component", "lines", "before"}),
    **{f"rl_{name}": frozenset({"run_id"}) for name in ("check_status", "stop_training", "get_results")},
    "rl_test_inference": frozenset({"models"}),
    "rl_start_training": frozenset({"again"}),
    "note_experiment": frozenset(
        {"hypothesis", "run_ids", "draft_id", "experiment_id", "outcome", "decision", "question", "goal"}
    ),
}
