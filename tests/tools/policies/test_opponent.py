"""Another run's checkpoint as the opponent: its weights answer, in a run of real processes."""

from __future__ import annotations

import json

import pytest
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.runs.inference import test_inference as start_test

from tests.support.tools_house import do, start_run
from tests.tools.policies.house import greedy
from toprope.errors import NotPossibleNow
from toprope.records.run.folder import read_json
from toprope.records.run.specification import Specification

PAIR = '''
"""Tells what its opponent says."""
import json
from dataclasses import replace

from toprope.sdk import OwnLoop, Part, Played, Task
from toprope.sdk.authoring.policy_client import ask

class Pair(OwnLoop):
    tags = ("self-play",)
    parts = {"length": Part(high=100)}

    def tasks(self):
        for number in range(60):
            yield Task("ab", key=str(number))

    async def rollout(self, session):
        calm = replace(session, temperature=0.0, max_tokens=6)
        mine = await ask(calm, self.task.messages)
        theirs = await ask(calm.as_opponent(), self.task.messages)
        told = json.dumps([mine["content"], theirs["content"]])
        said = {"role": "assistant", "content": mine["content"]}
        return Played({"length": len(told)}, [*self.task.messages, said, {"role": "user", "content": told}])
'''


@pytest.fixture
def draft(shop, live, owner, base):
    folder = shop.home.configuration / "environments"
    folder.mkdir(exist_ok=True)
    (folder / "pair.py").write_text(PAIR)
    draft_id = do(select_environment, live, name="pair").data.draft_id
    small = {"policy.model": str(base), "policy.max_context": 64, "rollout.max_new_tokens": 6}
    do(edit_config, live, draft_id=draft_id, changes=small)
    yield draft_id
    (folder / "pair.py").unlink()


@pytest.mark.parametrize(("step", "asked"), [(4, ""), (2, "@2")])
def test_weights_of_a_run_play_against_the_policy(live, draft, full, base, step, asked):
    do(edit_config, live, draft_id=draft, changes={"environment.opponent": f"run:{full.run_id}{asked}"})
    run_id = do(start_test, live, draft_id=draft, tasks=2, group_size=2).data.run_id
    status = do(live.runs.wait_end, run_id, 90)
    assert status.state == "completed", status.failure
    weights = full.checkpoints / f"step-{step:06d}" / "model"
    folder = live.runs.folder(run_id)
    assert Specification.read(folder).opponent_policy == str(weights)
    measured = read_json(folder.evaluation("test"))
    assert measured["sampled"]["errors"] == 0 and measured["sampled"]["rollouts"] == 4
    told = [json.loads(one["answer"].rpartition("user: ")[2]) for one in measured["examples"]]
    # The opponent keeps the temperature that the environment names, the policy has the run's.
    assert [theirs for _, theirs in told] == [greedy(weights)] * 2
    assert greedy(base) != greedy(weights)


def test_weights_that_do_not_exist_yet_are_refused_by_the_field_s_name(live, draft, shop):
    training = start_run(shop)
    do(edit_config, live, draft_id=draft, changes={"environment.opponent": f"run:{training.run_id}"})
    with pytest.raises(NotPossibleNow, match=f"environment.opponent is run:{training.run_id}, which is still"):
        do(start_test, live, draft_id=draft, tasks=2, group_size=2)
