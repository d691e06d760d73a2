"""Runs as resources: what there is, what it says, and notices of change in both eras of the protocol."""

import json
import time
import warnings

import anyio
import pytest
from mcp.client import Client
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError
from toprope_server.mcp.app import TopropeServer
from toprope_tools.answers.answer import TOKEN_BUDGET
from toprope_tools.resources.resource_changes import Changes
from toprope_tools.resources.resources import MOST_PLOT_BYTES
from toprope_tools.status.status import check_status

from tests.support.tools_house import age_stamp, become, make_workshop, start_run, step
from toprope.errors import NotFound
from toprope.records.run.status import EventLog

ERAS = ["auto", "legacy"]


@pytest.fixture
def house(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    yield shop, start_run(shop)
    launcher.close()


@pytest.fixture(params=ERAS)
def talk(request, house):
    def run(work, **options):
        async def main():
            with anyio.fail_after(40):
                async with Client(TopropeServer(lambda: house[0]), mode=request.param, **options) as client:
                    return await work(client)

        return anyio.run(main)

    return run


def write_metrics(folder, count):
    others = {f"a/metric/of_some/length_{number}": 0.123456789 for number in range(44)}  # a row of ours has as many
    first = [{"step": n, "reward": n / count, "time": 1.0 * n, "loss": None} for n in range(1, count + 1)]
    folder.metrics.write_text("".join(json.dumps(row | others) + "\n" for row in first))


def test_runs_are_listed_with_templates_of_parts(talk, house):
    _, folder = house

    async def work(client):
        return await client.list_resources(), await client.list_resource_templates()

    listed, templates = talk(work)
    assert [resource.uri for resource in listed.resources] == [
        "toprope://runs",
        "toprope://docs",
        f"toprope://runs/{folder.run_id}",
    ]
    assert [template.uri_template for template in templates.resource_templates] == [
        "toprope://runs/{run_id}",
        "toprope://runs/{run_id}/config",
        "toprope://runs/{run_id}/metrics",
        "toprope://runs/{run_id}/logs/{component}",
        "toprope://runs/{run_id}/plot.png",
        "toprope://datasets/{name}",
        "toprope://docs/{page}",
    ]


def test_every_resource_has_its_content(talk, house):
    _, folder = house
    step(folder, 500, total=1000)
    write_metrics(folder, 520)
    folder.log("trainer").write_text("step \x1b[31m1\n")
    folder.plot.write_bytes(b"\x89PNG picture")
    base = f"toprope://runs/{folder.run_id}"

    async def work(client):
        uris = ["toprope://runs", base, f"{base}/config", f"{base}/metrics", f"{base}/logs/trainer", f"{base}/plot.png"]
        return [(await client.read_resource(uri)).contents[0] for uri in uris]

    runs, run, config, metrics, log, plot = talk(work)
    assert json.loads(runs.text)["runs"][0]["run_id"] == folder.run_id
    told = json.loads(run.text)
    assert (told["state"], told["numbers"]["step"]) == ("training", 500)
    assert "learning_rate" in config.text
    assert config.mime_type == "application/yaml"
    lines = metrics.text.splitlines()
    assert lines[0].startswith("step,reward")
    assert 50 <= len(lines) <= 101
    assert len(metrics.text) / 4 <= TOKEN_BUDGET
    assert lines[-1].split(",")[0] == "500"  # no further than what was told
    assert "untrusted" in log.text
    assert "\x1b" not in log.text
    assert plot.mime_type == "image/png"


@pytest.mark.parametrize("component", ["environment-2", "tracker", "conductor"])
def test_log_of_every_component_is_read_by_tool_and_as_resource(talk, house, component):
    _, folder = house
    folder.log(component).write_text("said\n")

    async def work(client):
        called = await client.call_tool("read_logs", {"run_id": folder.run_id, "component": component})
        read = await client.read_resource(f"toprope://runs/{folder.run_id}/logs/{component}")
        return called.content[0].text, read.contents[0].text

    for text in talk(work):
        assert "| said" in text


def test_resources_keep_the_limit_on_fresh_numbers(talk, house):
    shop, folder = house
    step(folder, 1)
    write_metrics(folder, 90)
    anyio.run(lambda: check_status(shop, run_ids=[folder.run_id]))
    step(folder, 80)
    base = f"toprope://runs/{folder.run_id}"

    async def work(client):
        run, metrics = [(await client.read_resource(uri)).contents[0].text for uri in (base, f"{base}/metrics")]
        return json.loads(run)["numbers"]["step"], metrics.splitlines()[-1].split(",")[0]

    assert talk(work) == (1, "1")
    age_stamp(shop, folder.run_id, 60)
    assert talk(work) == (80, "80")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("toprope://drafts", "There are toprope://runs"),
        ("toprope://runs/no-such-run", "no run"),
        ("toprope://runs/../../etc", "There is no resource"),
        ("{run}/logs/passwords", "There is no resource"),
        ("{run}/logs/trainer", "no log of trainer"),
        ("{run}/plot.png", "no plot"),
    ],
)
def test_unknown_resource_is_an_error(talk, house, path, text):
    uri = path.replace("{run}", f"toprope://runs/{house[1].run_id}")

    async def work(client):
        with pytest.raises(MCPError, match=text) as refused:
            await client.read_resource(uri)
        return refused.value.error.code

    assert talk(work) == -32602


def test_too_large_plot_is_not_sent(talk, house):
    _, folder = house
    folder.plot.write_bytes(b"x" * (MOST_PLOT_BYTES + 1))

    async def work(client):
        with pytest.raises(MCPError, match="is not sent"):
            await client.read_resource(f"toprope://runs/{folder.run_id}/plot.png")

    talk(work)


def test_changes_are_notified_once_and_rarely(house):
    shop, folder = house
    uri = f"toprope://runs/{folder.run_id}"
    changes = Changes(shop, every_s=0.4)
    for one in ("toprope://runs", uri, f"{uri}/logs/trainer", f"{uri}/config"):
        changes.add(one)
    assert changes.news() == []
    become(folder, "validating")
    assert changes.news() == ["toprope://runs", uri]
    EventLog(folder).append("evaluation", label="before", summary={})
    EventLog(folder).append("evaluation", label="step-1", summary={})
    folder.log("trainer").write_text("one\n")
    assert changes.news() == [f"{uri}/logs/trainer"]  # the run was named just now
    limit = time.monotonic() + 20
    while not (found := changes.news()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert found == [uri]
    assert changes.news() == []


def test_new_numbers_notify_after_interval(house):
    shop, folder = house
    uri = f"toprope://runs/{folder.run_id}"
    step(folder, 1)
    anyio.run(lambda: check_status(shop, run_ids=[folder.run_id]))
    changes = Changes(shop, every_s=0.0)
    changes.add(uri)
    for number in range(2, 5):
        step(folder, number)
        assert changes.news() == []
    age_stamp(shop, folder.run_id, 60)
    assert changes.news() == [uri]
    step(folder, 9)
    assert changes.news() == []  # nobody has read it since


def test_unknown_resource_cannot_be_subscribed(house):
    changes = Changes(house[0])
    with pytest.raises(NotFound):
        changes.add("toprope://runs/nowhere")
    assert len(changes) == 0


def test_modern_subscriber_is_notified(house):
    shop, folder = house
    uri = f"toprope://runs/{folder.run_id}"

    async def main():
        with anyio.fail_after(40):
            async with Client(TopropeServer(lambda: shop)) as client:
                capabilities = client.server_capabilities
                with pytest.raises(MCPError, match="no run"):
                    async with client.listen(resource_subscriptions=["toprope://runs/nowhere"]):
                        pass
                async with client.listen(resource_subscriptions=[uri]) as stream:
                    become(folder, "validating")
                    async for event in stream:
                        return capabilities.resources.subscribe, event.uri

    assert anyio.run(main) == (True, uri)


def test_legacy_subscriber_is_notified_until_unsubscribed(house):
    shop, folder = house
    uri = f"toprope://runs/{folder.run_id}"
    told = anyio.Event()
    seen = []

    async def heard(message):
        if getattr(message, "method", "") == "notifications/resources/updated":
            seen.append(message.params.uri)
            told.set()

    async def main():
        with anyio.fail_after(40), warnings.catch_warnings():
            warnings.simplefilter("ignore", MCPDeprecationWarning)
            async with Client(TopropeServer(lambda: shop), mode="legacy", message_handler=heard) as client:
                with pytest.raises(MCPError, match="There is no resource"):
                    await client.subscribe_resource("toprope://elsewhere")
                await client.subscribe_resource(uri)
                become(folder, "validating")
                await told.wait()
                await client.unsubscribe_resource(uri)
                return client.server_capabilities.resources.subscribe

    assert anyio.run(main) is True
    assert seen == [uri]
