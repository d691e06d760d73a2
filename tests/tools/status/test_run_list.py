"""Lists of runs: what a row tells, filters and pages."""

import json
import time

import pytest
from toprope_tools.status.run_list import list_runs

from tests.support.tools_house import become, do, start_run
from toprope.atomic import write_json
from toprope.errors import InvalidValue
from toprope.settings.schema import Config


def test_list_tells_the_seed_of_a_groups_run(house):
    shop, _ = house
    config = Config()
    config.algorithm.seed = 3
    folder = start_run(shop, config=config)
    grouped = shop.home.runs / "sort-261129-1000-abcd-s2"
    folder.path.rename(grouped)
    write_json(grouped / "status.json", json.loads((grouped / "status.json").read_text()) | {"run_id": grouped.name})
    assert f"{grouped.name}: " in do(list_runs, shop).text
    assert "seed 3 of group sort-261129-1000-abcd" in do(list_runs, shop).text


def test_runs_are_listed_filtered_and_paged(house):
    shop, _ = house
    for _ in range(23):
        start_run(shop)
    runs = shop.statuses()
    become(shop.runs.folder(runs[3].run_id), "failed", ended_at=time.time())
    first = do(list_runs, shop)
    assert (first.data.total, len(first.data.runs)) == (23, 20)
    second = do(list_runs, shop, cursor=first.data.next_cursor)
    assert [item.run_id for item in first.data.runs + second.data.runs] == [run.run_id for run in runs]
    assert second.data.next_cursor is None
    last = do(list_runs, shop, cursor=f"{runs[-1].run_id}@{runs[-1].created_at!r}")
    assert last.text == "This page is past the end: the list has 23 runs." and last.data.total == 23
    asked = do(list_runs, shop, query="sort_letters", state="live")
    assert f'list_runs(state="live", query="sort_letters", cursor="{asked.data.next_cursor}")' in asked.text
    assert [item.run_id for item in do(list_runs, shop, state="ended").data.runs] == [runs[3].run_id]
    assert do(list_runs, shop, query="failed train").data.total == 1
    assert "There are no" in do(list_runs, shop, query="nothing like it").text
    with pytest.raises(InvalidValue, match="cursor"):
        do(list_runs, shop, cursor="nonsense")


def test_run_whose_status_cannot_be_read_says_so(house):
    shop, launcher = house
    folder = start_run(shop)
    launcher.leave(folder.run_id)
    folder.status.write_text("{broken")
    [row] = [line for line in do(list_runs, shop).text.splitlines() if line.startswith(folder.run_id)]
    assert row.startswith(f"{folder.run_id}: lost, ") and "Its status cannot be read" in row and ", ," not in row
