"""One task looks for changes while there is a page, and a page that follows another at once has one, too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from toprope_server.dashboard.pulse import Pulse

from toprope.settings.owner import Home


def test_page_that_comes_as_the_last_one_leaves_still_gets_changes(tmp_path):
    runs = [SimpleNamespace(run_id="a", state="training", ended=False)]
    home = Home(tmp_path / "home", tmp_path / "config")
    pulse = Pulse(SimpleNamespace(home=home, statuses=lambda: list(runs)), every_s=0.01)

    async def visit() -> None:
        first = pulse.messages(None)
        await anext(first)
        await first.aclose()
        second = pulse.messages(None)
        await anext(second)
        assert pulse.beating
        await asyncio.sleep(0.05)  # the first look only learns the state
        runs.append(SimpleNamespace(run_id="b", state="queued", ended=False))
        _, change = await asyncio.wait_for(anext(second), 5)
        assert change is not None and change["runs"]["b"] == ["status"]
        await second.aclose()
        assert not pulse.beating

    asyncio.run(visit())
