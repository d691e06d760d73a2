"""The page as an MCP App, through the official client: who is listed it, what it is told, how much at most."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.client.extension import ClientExtension
from mcp.server.apps import APP_MIME_TYPE, EXTENSION_ID
from mcp.shared.exceptions import MCPError
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role
from toprope_server.tool_specs.page import FIRST_LOOK, PAGE_URI
from toprope_tools.page.source import MOST_CHARACTERS
from toprope_tools.workshop import Workshop

from tests.support.dashboard_page import make_bundle
from tests.support.tools_house import StandInLauncher, become, make_workshop, start_run, step
from toprope.records.audit import AuditTrail
from toprope.records.run.status import EventLog
from toprope.workbench.approvals import Approvals

House = tuple[Workshop, StandInLauncher]
Talk = Callable[..., Any]


class Shows(ClientExtension):
    """A client that shows pages."""

    identifier = EXTENSION_ID

    def settings(self) -> dict[str, Any]:
        return {"mimeTypes": [APP_MIME_TYPE]}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    shop, launcher = make_workshop(tmp_path)
    shop.home.configuration.mkdir()
    yield shop, launcher
    launcher.close()


@pytest.fixture(params=["auto", "legacy"])
def talk(request: pytest.FixtureRequest, house: House, tmp_path: Path) -> Talk:
    """Runs a function with a client, which shows pages unless told otherwise."""
    bundle = make_bundle(tmp_path / "page")
    (bundle / "app.html").write_text("<!doctype html><title>app</title>")

    def run(
        work: Callable[[Client], Awaitable[Any]], *, shows: bool = True, built: bool = True, role: Role | None = None
    ) -> Any:
        async def main() -> Any:
            server = TopropeServer(lambda: house[0], role, bundle=bundle if built else tmp_path)
            with anyio.fail_after(60):
                extensions = [Shows()] if shows else None
                async with Client(server, mode=request.param, extensions=extensions) as client:
                    return await work(client)

        return anyio.run(main)

    return run


def long_run(house: House, steps: int = 3000) -> str:
    """A live run with many rows, events and long texts."""
    folder = start_run(house[0])
    become(folder, "training", started_at=1.0)
    step(folder, steps, total=steps + 10, reward=0.5)
    columns = ("reward", "loss", "entropy", "kl", "grad_norm", "reward_std", "success", "policy/moved", "time/step")
    with folder.metrics.open("w") as file:
        for number in range(1, steps + 1):
            file.write(json.dumps({"step": number, **{name: number / 7.0 for name in columns}}) + "\n")
    log = EventLog(folder)
    for number in range(400):
        log.append("warning", what=f"{number} " + "x" * 500)
    return folder.run_id


async def names(client: Client) -> tuple[list[str], list[str]]:
    tools = [tool.name for tool in (await client.list_tools()).tools]
    return tools, [str(one.uri) for one in (await client.list_resources()).resources]


def test_page_is_listed_to_clients_that_declared_it_alone(talk: Talk) -> None:
    tools, resources = talk(names)
    assert tools[-2:] == ["show", "look"] and PAGE_URI in resources
    plain, others = talk(names, shows=False)
    assert plain == tools[:-2] and PAGE_URI not in others
    assert talk(names, built=False) == (plain, others)


def test_tools_name_their_page_and_who_may_call(talk: Talk) -> None:
    async def work(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["show"].meta == {"ui": {"resourceUri": PAGE_URI, "visibility": ["model", "app"]}}
        assert tools["look"].meta == {"ui": {"resourceUri": PAGE_URI, "visibility": ["app"]}}
        assert all(tools[name].annotations.read_only_hint for name in ("show", "look"))  # type: ignore[union-attr]
        [content] = (await client.read_resource(PAGE_URI)).contents
        assert content.mime_type == APP_MIME_TYPE and "<title>app</title>" in content.text  # type: ignore[union-attr]

    talk(work)


def test_show_gives_text_to_the_model_and_the_first_look_to_the_page(talk: Talk, house: House) -> None:
    run_id = long_run(house, 30)

    async def work(client: Client) -> None:
        shown = await client.call_tool("show", {"run_id": run_id})
        assert run_id in shown.content[0].text and "toprope dashboard" in shown.content[0].text  # type: ignore[union-attr]
        assert shown.structured_content == {"screen": "run", "run_id": run_id}
        first = shown.meta[FIRST_LOOK]  # type: ignore[index]
        assert first["live"]["run"]["run_id"] == run_id and first["fixed"]["algorithm"] == "grpo"
        now = await client.call_tool("show", {})
        assert now.meta[FIRST_LOOK]["what"] == "now"  # type: ignore[index]

    talk(work)


def test_page_offers_to_stop_only_what_its_client_may_stop(talk: Talk, house: House) -> None:
    run_id = long_run(house, 30)

    async def work(client: Client) -> tuple[bool, bool]:
        run = await client.call_tool("look", {"what": "run", "run_id": run_id})
        now = await client.call_tool("look", {"what": "now"})
        return run.structured_content["live"]["may"]["stop"], now.structured_content["read_only"]  # type: ignore[index]

    assert talk(work) == (True, False)
    assert talk(work, role=Role.of(True)) == (False, True)
    assert talk(work, role=Role.of(sets="plan,read")) == (False, True)


def test_page_tools_are_not_named_where_tools_are_listed(talk: Talk) -> None:
    refused = talk(lambda client: client.call_tool("nothing_like_it", {}), shows=False)
    assert "check_status" in refused.content[0].text
    assert not {"show", "look"} & set(refused.content[0].text.rstrip(".").split(", "))


def test_clients_without_the_extension_get_text(talk: Talk, house: House) -> None:
    run_id = long_run(house, 30)

    async def work(client: Client) -> None:
        shown = await client.call_tool("show", {"run_id": run_id})
        assert not shown.is_error and "training" in shown.content[0].text  # type: ignore[union-attr]

    talk(work, shows=False)
    talk_built = talk(lambda client: client.call_tool("show", {}), built=False)
    assert talk_built.is_error and "no tool 'show'" in talk_built.content[0].text


def test_every_result_has_at_most_60000_characters(talk: Talk, house: House) -> None:
    run_id = long_run(house)

    async def work(client: Client) -> None:
        for name, arguments in (
            ("show", {"run_id": run_id}),
            ("show", {}),
            ("look", {"what": "run", "run_id": run_id}),
            ("look", {"what": "run", "run_id": run_id, "after": "1.0.0"}),
            ("look", {"what": "compare", "a": [run_id], "b": [run_id]}),
            ("look", {"what": "runs"}),
        ):
            found = await client.call_tool(name, arguments)
            assert not found.is_error
            assert len(found.model_dump_json(by_alias=True)) <= MOST_CHARACTERS, (name, arguments)

    talk(work)


def test_page_shows_numbers_that_check_status_may_tell(talk: Talk, house: House) -> None:
    run_id = long_run(house, 30)
    folder = house[0].runs.folder(run_id)

    async def work(client: Client) -> None:
        first = (await client.call_tool("look", {"what": "run", "run_id": run_id})).structured_content
        assert first is not None and first["live"]["series"]["last_step"] == 30
        step(folder, 60, total=90, reward=0.9)
        with folder.metrics.open("a") as file:
            file.writelines(json.dumps({"step": number, "reward": 0.9}) + "\n" for number in range(31, 61))
        asked = {"what": "run", "run_id": run_id, "after": first["live"]["cursor"]}
        after = (await client.call_tool("look", asked)).structured_content
        assert after is not None and after["live"]["run"]["progress"]["step"] == 30  # within the interval
        assert after["live"]["series"] is None

    talk(work)


def test_page_opens_no_way_to_the_owners_part(talk: Talk, house: House) -> None:
    Approvals(house[0].home).ask("ab" * 12, "a run that waits")
    run_id = long_run(house, 5)

    async def work(client: Client) -> None:
        now = (await client.call_tool("look", {"what": "now"})).structured_content
        assert now is not None and now["waiting"] == [] and now["diary"] == [] and now["may_act"] is False
        run = (await client.call_tool("look", {"what": "run", "run_id": run_id})).structured_content
        assert run is not None and run["live"]["may"] == {"stop": True, "resume": False}
        for what in ("ledger", "log", "datasets", "environments"):
            assert (await client.call_tool("look", {"what": what})).is_error

    talk(work)


def test_polls_of_the_page_leave_no_trace(talk: Talk, house: House) -> None:
    house[0].home.ensure()

    async def work(client: Client) -> None:
        await client.call_tool("look", {"what": "now"})
        await client.call_tool("show", {})

    talk(work)
    assert [one["did"] for one in AuditTrail(house[0].home.path).newest(9)] == ["show"]


def test_page_that_was_removed_is_an_error_of_its_own(talk: Talk, tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        (tmp_path / "page" / "app.html").unlink()
        with pytest.raises(MCPError, match="make page"):
            await client.read_resource(PAGE_URI)

    talk(work)
