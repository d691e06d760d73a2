"""The card of an exported policy: README.md with the front matter that the Hugging Face Hub reads.

A pure function over a run's records. Local paths do not appear in it, because cards are made to be shared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toprope.analysis.reports.headline import standard_lines
from toprope.analysis.reports.page import escape_markdown
from toprope.analysis.reports.results import Accuracy, Evaluation, Results
from toprope.records.run.manifest import Manifest, Policy
from toprope.records.run.specification import Specification
from toprope.settings.schema import EMBEDDED
from toprope.text_format import accuracy, clip, number, plural

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SHOWN = (
    ("algorithm", ("name", "loss_type", "beta", "epsilon", "epsilon_high", "scale_rewards", "seed")),
    ("optimizer", ("learning_rate", "lr_scheduler_type", "adam_beta2", "max_grad_norm")),
    ("rollout", ("group_size", "groups_per_step", "max_new_tokens", "temperature", "top_p", "max_staleness")),
)
_SHOWN_SFT = (("algorithm", ("name", "seed")), ("sft", ("epochs", "batch_size", "learning_rate", "max_length")))
_LIBRARIES = {"merged": "transformers", "adapter": "peft", "gguf": "gguf"}
_RELATIONS = {"merged": "finetune", "adapter": "adapter", "gguf": "quantized"}


@dataclass(frozen=True)
class Exported:
    """A checkpoint to export, with the records of its run."""

    results: Results
    specification: Specification
    manifest: Manifest | None
    step: int
    policy_version: int
    form: str
    """merged, adapter or gguf."""
    ancestors: Sequence[Mapping[str, Any]] = ()
    """As `toprope.analysis.integrity.lineage_of` returns them."""
    dataset: Mapping[str, Any] = field(default_factory=dict)
    """The lineage of the data set's version; empty without one."""
    began: Policy | None = None
    """The model that the first run of the line of descent started from, as its manifest has it."""


def hub_id(model: str) -> str:
    """Return a `policy.model` that is an id of the Hub, else an empty string."""
    local = model in EMBEDDED or model.startswith((".", "/", "~", "run:")) or Path(model).is_dir()
    return model if not local and _HUB_ID.fullmatch(model) else ""


def root_model(exported: Exported) -> str:
    """Return the model that the first run of the line of descent started from."""
    origin = exported.ancestors[-1] if exported.ancestors else {}
    return str(origin.get("model") or exported.specification.config.policy.model)


def quantization_warning(exported: Exported) -> str:
    """Return that merged weights differ from those that were trained; empty if they do not."""
    policy = exported.specification.config.policy
    if exported.form == "adapter" or not (policy.load_in_4bit or policy.load_in_8bit):
        return ""
    return (
        f"The policy was trained over weights in {4 if policy.load_in_4bit else 8} bits, and its adapters are merged "
        "into the unquantized ones: answers and scores may differ from those measured. Form adapter is exact."
    )


def model_card(exported: Exported) -> str:
    """Compose the card."""
    run_id, root = exported.results.run_id, root_model(exported)
    name = f"{run_id} at step {exported.step}"
    evaluations = {
        label: evaluation
        for label, evaluation in exported.results.evaluations.items()
        if _is_of_step(exported, evaluation)
    }
    front: dict[str, Any] = {"library_name": _LIBRARIES[exported.form], "pipeline_tag": "text-generation"}
    if hub_id(root):
        front |= {"base_model": root, "base_model_relation": _RELATIONS[exported.form]}
    if exported.began is not None and exported.began.licence:
        front["license"], _, stated = exported.began.licence.partition(": ")
        front |= {"license_name": stated} if stated else {}
    front["tags"] = ["toprope", exported.specification.config.algorithm.name]
    if index := _index(exported, evaluations):
        front["model-index"] = [{"name": name, "results": index}]
    lines = ["---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(), "---", "", f"# {name}", ""]
    lines += [_summary(exported, root), ""]
    for title, part in (
        ("Evaluation", _evaluations(exported, evaluations)),
        ("Training", _training(exported)),
        ("Data", _data(exported)),
        ("Reproduction", _origin(exported)),
    ):
        lines += [f"## {title}", "", *part, ""]
    return "\n".join(lines).rstrip() + "\n"


def _is_of_step(exported: Exported, evaluation: Evaluation) -> bool:
    same = evaluation.policy_version == exported.policy_version and not evaluation.versions
    return same and evaluation.sampled is not None


def _describe_model(model: str) -> str:
    if model in EMBEDDED:
        return f"`{model}` (a tiny policy that Toprope makes)"
    return f"`{model}`" if hub_id(model) else "a local folder"


def _code(text: object) -> str:
    """A name that others chose, as code that it cannot end."""
    return f"`{clip(str(text), 120).replace('`', chr(39))}`"


def _summary(exported: Exported, root: str) -> str:
    specification = exported.specification
    how = "supervised fine-tuning" if exported.results.kind == "sft" else "reinforcement learning"
    environments = [specification.environment, *specification.mixture]
    environment_names = ", ".join(f"{_code(source.name)}" for source in environments)
    contents = {
        "merged": "All weights, in safetensors.",
        "adapter": "LoRA adapters, without the model that they belong to.",
        "gguf": "One GGUF file for llama.cpp.",
    }[exported.form]
    text = (
        f"Trained by Toprope with {how} ({specification.config.algorithm.name}) on {environment_names}, from "
        f"{_describe_model(root)}. {contents}"
    )
    if specification.config.algorithm.shuffle_rewards:
        text += " **A control**: rewards were shuffled, so nothing was to be learned."
    return f"{text} {quantization_warning(exported)}".rstrip()


def _index(exported: Exported, evaluations: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    entries = []
    for evaluation in evaluations.values():
        for way, measured in (("sampled", evaluation.sampled), ("greedy", evaluation.greedy)):
            if measured is None:
                continue
            environment = exported.specification.environment.name
            entries.append(
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"name": environment, "type": environment, "split": evaluation.split or "validation"},
                    "metrics": [
                        {"type": "accuracy", "name": f"accuracy ({way})", "value": round(measured.accuracy, 4)}
                    ],
                }
            )
    return entries


def _evaluations(exported: Exported, evaluations: Mapping[str, Evaluation]) -> list[str]:
    lines = []
    if not evaluations:
        lines += [f"The policy of step {exported.step} was not evaluated.", ""]
    listed = {
        label: evaluation
        for label, evaluation in exported.results.evaluations.items()
        if label == "before" or label in evaluations
    }
    if listed:
        lines += ["| policy | tasks | sampled | greedy |", "| --- | --- | --- | --- |"]
    for label, evaluation in listed.items():
        policy = f"step {exported.step}" if label in evaluations else "before training"
        tasks = f"{evaluation.sampled.tasks if evaluation.sampled else 0} {evaluation.split}"
        lines.append(f"| {policy} | {tasks} | {_share(evaluation.sampled)} | {_share(evaluation.greedy)} |")
    if listed:
        lines += [
            "",
            "Accuracy is the share of tasks that the environment's own success counts, with its 95 % interval.",
        ]
    measured = [standard for standard in exported.results.standard if standard.step in (None, exported.step)]
    if standard_scores := standard_lines(measured, _code):
        lines += ["", "On standard tasks:", "", *(f"- {line}" for line in standard_scores)]
    integrity = exported.results.integrity
    for check in integrity.checks if integrity is not None else ():
        if check.state == "warning":
            lines += ["", f"Warning: {escape_markdown(check.what)}"]
    return lines


def _share(measured: Accuracy | None) -> str:
    return "" if measured is None else accuracy(measured)


def _training(exported: Exported) -> list[str]:
    config = exported.specification.config
    lines = ["| setting | value |", "| --- | --- |"]
    for section, names in _SHOWN_SFT if exported.results.kind == "sft" else _SHOWN:
        for name in names:
            value = getattr(getattr(config, section), name)
            lines.append(f"| `{section}.{name}` | {number(value) if isinstance(value, float) else value} |")
    if config.policy.chat_template_kwargs:
        lines.append(f"| `policy.chat_template_kwargs` | {_code(json.dumps(config.policy.chat_template_kwargs))} |")
    if config.policy.lora:
        rank, scale = config.policy.lora_rank, number(config.policy.lora_alpha)
        lines.append(f"| `policy.lora_rank`, `policy.lora_alpha` | {rank}, {scale} |")
    return lines


def _data(exported: Exported) -> list[str]:
    specification, lines = exported.specification, []
    for source in (specification.environment, *specification.mixture):
        recorded = exported.manifest.environment if exported.manifest and source is specification.environment else None
        if exported.manifest and recorded is None:
            recorded = next(
                (member for member in exported.manifest.mixture.values() if member.name == source.name), None
            )
        digest = f", SHA-256 `{recorded.sha256}`" if recorded and recorded.sha256 else ""
        lines.append(f"- environment {_code(source.name)}{digest}")
    if specification.config.environment.knobs:
        written = yaml.safe_dump(
            _without_folders(specification.config.environment.knobs), default_flow_style=True
        ).strip()
        lines.append(f"- its knobs: {_code(written)}")
    if specification.dataset is not None:
        data = specification.dataset
        lines.append(f"- data set `{data.name}`: {plural(data.items, 'item')}, SHA-256 `{data.sha256}`")
        for run, source_run in (exported.dataset.get("runs") or {}).items():
            lines.append(f"  - from run `{run}` on {_code(source_run.get('environment', ''))}")
        lines += [f"  - from data set `{name}`" for name in exported.dataset.get("datasets") or ()]
    if specification.teacher is not None:
        lines.append(f"- demonstrations by the model {_code(specification.teacher.name)}")
    for ancestor in exported.ancestors:
        if "run" in ancestor:
            lines.append(f"- began with the weights of run `{ancestor['run']}` at step {ancestor['step']}")
    split = "Tasks are split by content; held-out tasks were used for the evaluations before and after only."
    evaluations = exported.results.evaluations.values()
    if any(evaluation.split == "train" for evaluation in evaluations):
        split = "Training and evaluation used the same tasks, because there are too few to hold any out."
    elif apart := {
        name
        for evaluation in evaluations
        for name, measured in evaluation.environments.items()
        if measured.split == "train"
    }:
        names = ", ".join(map(_code, sorted(apart)))
        split += f" Too few to hold any out, and in no accuracy above: the tasks of {names}."
    lines += ["", split]
    return lines


def _without_folders(knob_value: Any) -> Any:
    """Return a knob's value with the last part alone of each path of this machine, at any depth."""
    if isinstance(knob_value, Mapping):
        return {name: _without_folders(inner) for name, inner in knob_value.items()}
    if isinstance(knob_value, list | tuple):
        return [_without_folders(inner) for inner in knob_value]
    return Path(knob_value).name if isinstance(knob_value, str) and knob_value.startswith(("/", "~")) else knob_value


def _origin(exported: Exported) -> list[str]:
    if exported.manifest is None:
        return ["The run has no manifest."]
    manifest, lines = exported.manifest, []
    if exported.began is not None and exported.began.licence:
        lines.append(f"- licence of the model that training began with: {_code(exported.began.licence)}")
    lines.append(
        f"- Toprope {manifest.code.version}" + (f", commit `{manifest.code.commit}`" if manifest.code.commit else "")
    )
    if manifest.code.changes_sha256:
        lines[-1] += ", with uncommitted changes"
    lines.append(f"- configuration SHA-256 `{manifest.configuration.sha256}`, seed {manifest.configuration.seed}")
    if manifest.policy.revision:
        lines.append(f"- starting weights at commit `{manifest.policy.revision}`")
    if manifest.policy.sha256:
        lines.append(f"- starting weights SHA-256 `{manifest.policy.sha256}` (over {manifest.policy.hashed})")
    hardware = [manifest.hardware.cpu, f"{manifest.hardware.cores} cores", *manifest.hardware.gpus]
    lines.append(f"- {escape_markdown(', '.join(part for part in hardware if part))}; Python {manifest.python}")
    versions = (f"{name} {version}" for name, version in manifest.libraries.items() if version)
    lines.append(f"- {escape_markdown(', '.join(versions))}")
    return lines
