"""Pictures as images, and what a live run's results withhold."""

import base64
import json
import time

import anyio
import pytest
from mcp.client import Client
from toprope_server.mcp.app import TopropeServer
from toprope_tools.resources.resources import MOST_PLOT_BYTES
from toprope_tools.results.results import get_results
from toprope_tools.status.status import check_status

from tests.support.tools_house import age_stamp, become, start_run, step

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def house(house):
    shop, _ = house
    return shop, start_run(shop)


def results(shop, folder, **named):
    return anyio.run(lambda: get_results(shop, run_id=folder.run_id, **named))


def write_metrics(folder, count):
    rows = [json.dumps({"step": n, "reward": n / 100, "success": 0.5, "rollouts": 8 * n}) for n in range(1, count + 1)]
    folder.metrics.write_text("\n".join(rows) + "\n")


def test_plot_of_run_is_image_beside_text(house):
    shop, folder = house
    folder.plot.write_bytes(PNG + b"drawn")

    async def main():
        async with Client(TopropeServer(lambda: shop)) as client:
            with_it = await client.call_tool("get_results", {"run_id": folder.run_id, "plot": True})
            without = await client.call_tool("get_results", {"run_id": folder.run_id})
            return with_it.content, without.content

    with_it, without = anyio.run(main)
    assert [block.type for block in with_it] == ["text", "image"]
    assert (with_it[1].mime_type, base64.b64decode(with_it[1].data)) == ("image/png", PNG + b"drawn")
    assert [block.type for block in without] == ["text"]


def test_missing_plot_is_explained(house):
    shop, folder = house
    answer = results(shop, folder, plot=True)
    assert answer.picture is None
    assert "No picture: it is drawn when the run ends." in answer.text
    folder.plot.write_bytes(b"x" * (MOST_PLOT_BYTES + 1))
    assert "larger than 1 MiB; it is at" in results(shop, folder, plot=True).text


def test_run_that_ended_early_is_plotted_without_leftovers(house):
    shop, folder = house
    write_metrics(folder, 20)
    become(folder, "stopped", ended_at=time.time())
    before = {path.name for path in folder.path.iterdir()}
    answer = results(shop, folder, plot=True)
    assert answer.picture is not None, answer.text
    assert answer.picture.startswith(PNG)
    assert {path.name for path in folder.path.iterdir()} - before == {"explanation.json"}


def test_results_of_live_run_keep_the_limit_on_fresh_numbers(house):
    shop, folder = house
    write_metrics(folder, 90)
    step(folder, 30)
    anyio.run(lambda: check_status(shop, run_ids=[folder.run_id]))
    step(folder, 90)
    answer = results(shop, folder, detail="detailed")
    assert answer.data.results["steps"] == 30
    assert max(point["step"] for point in answer.data.detail["history"]) <= 30
    assert "90" not in answer.text.partition("Configuration")[0].replace(folder.run_id, "")
    age_stamp(shop, folder.run_id, 60)
    assert results(shop, folder).data.results["steps"] == 90
