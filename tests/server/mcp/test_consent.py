"""A person's word before a start: asked through the client where it can, in both eras, else on the command line."""

from __future__ import annotations

import anyio
import pytest
from mcp.client import Client
from mcp.types import ElicitResult
from toprope_server.mcp.app import TopropeServer

from tests.support.tools_house import make_workshop
from toprope.records.run.specification import EnvironmentSource
from toprope.settings.presets import load_preset
from toprope.workbench.approvals import Approvals

ERAS = ["auto", "legacy"]


@pytest.fixture
def house(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    shop.home.configuration.mkdir(parents=True)
    (shop.home.configuration / "limits.yaml").write_text("confirm: always\n")
    shop.home.ensure()
    yield shop
    launcher.close()


def drafted(shop):
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    source = EnvironmentSource(name="dice", file="/nowhere/dice.py", attribute="Dice")
    return shop.drafts.create(source, preset, [], shop.home.locks())[0].id


def talk(shop, mode, work, **options):
    async def run():
        with anyio.fail_after(60):
            async with Client(TopropeServer(lambda: shop), mode=mode, **options) as client:
                return await work(client)

    return anyio.run(run)


def answering(action, content=None, asked=None):
    async def callback(context, params):
        if asked is not None:
            asked.append(params)
        return ElicitResult(action=action, content=content)

    return {"elicitation_callback": callback}


@pytest.mark.parametrize("mode", ERAS)
def test_agreement_starts_the_previewed_run(house, mode):
    asked = []

    async def work(client):
        return await client.call_tool("start_training", {"draft_id": drafted(house), "seeds": 2})

    result = talk(house, mode, work, **answering("accept", {"start": True}, asked))
    assert not result.is_error, result.content
    assert len(result.structured_content["run_ids"]) == 2
    [question] = asked
    assert "revision 1: environment dice, policy embedded." in question.message
    assert "2 runs" in question.message and "time at most " in question.message and "(hash " in question.message
    assert not Approvals(house.home).pending(), "nothing waits that would start a second time"


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("answer", [("decline", None), ("accept", {"start": False})])
def test_refusal_starts_nothing(house, mode, answer):
    async def work(client):
        return await client.call_tool("start_training", {"draft_id": drafted(house)})

    result = talk(house, mode, work, **answering(*answer))
    assert result.is_error and "did not agree" in result.content[0].text
    assert "preview by the same tool" in result.content[0].text
    assert "Nothing was changed" in result.content[0].text and house.statuses() == []


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("content", [{"confirm": False}, {"start": "perhaps"}, {}, None])
def test_unreadable_answer_starts_nothing_and_waits_for_the_owner(house, mode, content):
    async def work(client):
        return await client.call_tool("start_training", {"draft_id": drafted(house)})

    result = talk(house, mode, work, **answering("accept", content))
    text = result.content[0].text
    assert result.is_error and "the client's answer" in text and "could not be read" in text
    assert "Nothing was changed" in text and "toprope approve" in text and house.statuses() == []
    if content is not None:
        [request] = Approvals(house.home).pending()
        assert f"toprope approve {request.hash}" in text and not request.approved


@pytest.mark.parametrize("mode", ERAS)
def test_an_agent_cannot_confirm_itself(house, mode):
    """The attack: the refusal names the hash, and the agent types it."""

    async def work(client):
        draft_id = drafted(house)
        refused = await client.call_tool("start_training", {"draft_id": draft_id})
        assert refused.is_error
        text = refused.content[0].text
        assert "wants every start confirmed" in text and "Nothing was changed" in text
        told = text.split("toprope approve ")[1].split(".")[0]
        again = await client.call_tool("start_training", {"draft_id": draft_id, "confirm": told})
        assert again.is_error and house.statuses() == []
        [request] = Approvals(house.home).pending()
        assert request.hash == told and not request.approved
        Approvals(house.home).approve(told)
        started = await client.call_tool("start_training", {"draft_id": draft_id, "confirm": told})
        used = await client.call_tool("start_training", {"draft_id": draft_id, "confirm": told, "again": True})
        assert used.is_error and "wants every start confirmed" in used.content[0].text
        return started

    result = talk(house, mode, work)
    assert not result.is_error and result.structured_content["state"] == "queued"
    assert len(house.statuses()) == 1


def test_a_refusal_of_the_owner_is_not_asked_about_again(house):
    draft, asked = drafted(house), []

    async def work(client):
        shown = await client.call_tool("start_training", {"draft_id": draft, "preview": True})
        told = shown.structured_content["preview"]["hash"]
        Approvals(house.home).ask(told, "a run")
        Approvals(house.home).refuse(told)
        return await client.call_tool("start_training", {"draft_id": draft})

    result = talk(house, "auto", work, **answering("accept", {"start": True}, asked))
    assert result.is_error and "owner refused" in result.content[0].text
    assert asked == [] and house.statuses() == []


def test_agreement_does_not_overrule_a_refusal_meanwhile(house):
    draft = drafted(house)

    async def work(client):
        return await client.call_tool("start_training", {"draft_id": draft})

    async def accepted(context, params):
        told = params.message.split("(hash ")[1].rstrip(")")
        Approvals(house.home).ask(told, "a run")
        Approvals(house.home).refuse(told)
        return ElicitResult(action="accept", content={"start": True})

    result = talk(house, "auto", work, elicitation_callback=accepted)
    assert result.is_error and "owner refused" in result.content[0].text and house.statuses() == []


def test_agreement_uses_up_what_waited_for_the_owner(house):
    draft = drafted(house)

    async def work(client):
        shown = await client.call_tool("start_training", {"draft_id": draft, "preview": True})
        assert not Approvals(house.home).pending(), "a preview asks nobody"
        Approvals(house.home).ask(shown.structured_content["preview"]["hash"], "a run")
        return await client.call_tool("start_training", {"draft_id": draft})

    result = talk(house, "auto", work, **answering("accept", {"start": True}))
    assert not result.is_error and not Approvals(house.home).pending()


SPACE = {"optimizer.learning_rate": {"min": 1e-4, "max": 1e-2, "log": True}}


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("agrees", [True, False])
def test_sweep_asks_for_consent_as_training_does(house, mode, agrees):
    asked = []

    async def work(client):
        arguments = {"draft_id": drafted(house), "space": SPACE, "population": 3, "epochs": 1, "options": {"steps": 5}}
        return await client.call_tool("start_sweep", arguments)

    result = talk(house, mode, work, **answering("accept", {"start": agrees}, asked))
    [question] = asked
    assert "Start this sweep?" in question.message and "5 runs" in question.message and "(hash " in question.message
    assert "environment dice, policy embedded." in question.message
    assert result.is_error is not agrees, result.content
    assert len(house.statuses()) == int(agrees)


def test_a_client_is_not_asked_if_the_owner_confirms_on_the_command_line(house):
    house.home.settings_file.write_text("confirm_by: cli\n")
    asked = []

    async def work(client):
        return await client.call_tool("start_training", {"draft_id": drafted(house)})

    result = talk(house, "auto", work, **answering("accept", {"start": True}, asked))
    assert result.is_error and asked == [] and house.statuses() == []


def test_consent_is_not_asked_if_owner_does_not_require_it(house):
    (house.home.configuration / "limits.yaml").write_text("confirm: never\n")
    asked = []

    async def work(client):
        return await client.call_tool("start_training", {"draft_id": drafted(house)})

    result = talk(house, "auto", work, **answering("decline", None, asked))
    assert not result.is_error and asked == []
