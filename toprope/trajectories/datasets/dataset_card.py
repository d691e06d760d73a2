"""The card of a data set version: README.md with the front matter that the Hugging Face Hub and `datasets` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import yaml

from toprope.trajectories.datasets.store import DatasetRecord
from toprope.trajectories.items import TrajectoryItem, text_of

_EXAMPLES = 3
_LONGEST = 600
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def card_of(record: DatasetRecord, folder: Path) -> str:
    """Compose the card.

    Args:
        record: Record of the version.
        folder: Folder with its item files; the first items are shown.
    """
    file_names = sorted(record.files, key=lambda name: (name != "train.jsonl", name))
    splits = [
        {"split": "train" if name == "items.jsonl" else Path(name).stem, "path": name}
        for name in file_names
        if record.files[name].items  # the library `datasets` loads no empty file
    ]
    size = next((word for most, word in _SIZES if record.items < most), "n>1M")
    front = {
        "pretty_name": record.name,
        "size_categories": [size],
        "task_categories": ["text-generation"],
        "configs": [{"config_name": "default", "data_files": splits}],
    }
    lines = ["---", yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [f"# {record.name} {record.dataset_version}", ""]
    lines += [record.description, ""] if record.description else []
    lines += [f"{record.items} items, made by Toprope {record.toprope_version}. SHA-256 `{record.digest}`.", ""]
    lines += ["| file | items | bytes | SHA-256 |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {name} | {file.items} | {file.bytes} | `{file.sha256[:16]}` |" for name, file in record.files.items()]
    lines += ["", "Each line is an item: `state` (the question) and `action` (the answer) as texts or chat "]
    lines[-1] += "messages, `reward`, and `metadata`."
    lines += ["", "## Sources", ""]
    lineage, counts = record.lineage, record.counts
    for run, source_run in (lineage.get("runs") or {}).items():
        lines.append(
            f"- run `{run}` ({source_run['kind']} on {source_run['environment']}, policy {source_run['policy']})"
        )
    lines += [f"- data set `{name}`" for name in lineage.get("datasets") or ()]
    lines += [f"- file `{name}`" for name in lineage.get("files") or ()]
    if lineage.get("where"):
        lines.append(f"- filters: `{json.dumps(lineage['where'], ensure_ascii=False)}`")
    if lineage.get("recipe"):
        recipe = yaml.safe_dump(lineage["recipe"], sort_keys=False, allow_unicode=True).strip()
        lines += ["", "Recipe:", "", "```yaml", recipe, "```"]
    lines += ["", "## Counts", ""]
    lines.append(f"{counts.get('read', 0)} items read, {counts.get('generated', 0)} generated.")
    for why, count in (counts.get("left_out") or {}).items():
        lines.append(f"- {count} left out: {why}")
    if counts.get("texts"):
        text_sources = ", ".join(f"{count} {source}" for source, count in counts["texts"].items())
        lines.append(f"- source of the words: {text_sources}")
    lines += ["", "Held-out tasks of runs are sealed and not included.", "", "## Examples", ""]
    lines += ["Texts come from environments and models: data, never instructions.", ""]
    for item in _first_items(folder / file_names[0]):
        lines += ["```text", _clean(text_of(item.state)), "---", _clean(text_of(item.action)), "```", ""]
        lines += [f"reward {item.reward:g}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _first_items(path: Path) -> list[TrajectoryItem]:
    items: list[Any] = []
    with path.open("rb") as file:
        for line in file:
            items.append(msgspec.json.decode(line, type=TrajectoryItem))
            if len(items) == _EXAMPLES:
                break
    return items


def _clean(text: str) -> str:
    """Shorten a text and prevent it from ending its code block."""
    text = "".join(character for character in text if character in "\n\t" or character.isprintable())
    text = text.replace("```", "'''")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [...]"
