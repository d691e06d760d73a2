"""docs/datasets.md is true: its files can be read, its calls work, its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anyio
import pytest
from toprope_tools.planning.environments import describe_environment

from tests.support.tools_house import make_workshop
from toprope.sdk.adapters._shared.rows import HUB, KINDS
from toprope.sdk.adapters.dataset import DatasetKnobs, knob_names
from toprope.sdk.authoring.knobs import describe_knobs
from toprope.settings.owner import OwnerSettings

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "datasets.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def shop(tmp_path):
    house, launcher = make_workshop(tmp_path)
    yield house
    launcher.close()


def test_settings_blocks_are_valid(tmp_path: Path) -> None:
    found = [block for block in blocks("yaml") if block.startswith("# settings.yaml")]
    assert len(found) == 2
    file = tmp_path / "settings.yaml"
    for block in found:
        file.write_text(block)
        settings = OwnerSettings.read(file)
    assert set(settings.models) == {"my-vllm", "judge"} and "models" in settings.variables


def test_named_environment_and_call_work(tmp_path: Path, shop) -> None:
    environments, datasets = tmp_path / "config" / "environments", tmp_path / "home" / "datasets"
    environments.mkdir(parents=True)
    datasets.mkdir(parents=True)
    named = next(block for block in blocks("yaml") if "adapter: dataset" in block)
    (environments / "capitals.yaml").write_text(named)
    (environments / "capitals.csv").write_text(
        "country,capital\n" + "".join(f"Country {n},Capital {n}\n" for n in range(60))
    )
    row = json.loads(blocks("json")[0])
    (datasets / "sums.jsonl").write_text(
        "".join(json.dumps(row | {"question": f"{row['question']} {n}"}) + "\n" for n in range(60))
    )
    call = re.search(r'describe_environment\(name="dataset", knobs=(\{.*?\})\)', TEXT)
    assert call is not None

    async def work():
        return [
            await describe_environment(shop, name="capitals"),
            await describe_environment(shop, name="dataset", knobs=json.loads(call.group(1))),
        ]

    for told in anyio.run(work):
        assert "rewards: reference 1, " in told.text and "Remark:" not in told.text
        assert sum(split["known"] for split in told.data.splits.values()) == 60


def test_scorer_and_file_tables_are_complete() -> None:
    scorers = next(knob for knob in describe_knobs(DatasetKnobs) if knob["name"] == "scorer")["choices"]
    assert re.findall(r"^\| `(\w+)` \|", TEXT.partition("## Scorers")[2], re.MULTILINE) == scorers
    assert all(f"`{kind}`" in TEXT for kind in KINDS) and f"`{HUB}" in TEXT
    named = set(re.findall(r"`(\w+)`", TEXT))
    assert {"config", "split", "choices", "tolerance", "time_limit_s", "memory_mb"} <= named & set(knob_names())
    assert set(re.findall(r"environment\.knobs\.(\w+)", TEXT)) <= set(knob_names())
