"""Environments that need settings or time: knobs at every door, loading that outlasts a call, and its limit."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
import yaml
from toprope_tools.clients import Client
from toprope_tools.openings import Caller, Openings
from toprope_tools.planning import environment_check, opening
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environment_check import check_environment
from toprope_tools.planning.environments import describe_environment, list_environments, select_environment
from toprope_tools.planning.opening import options_of

from tests.support.tools_house import do
from toprope.errors import EnvironmentFailed, InvalidValue, NotFound, NotPossibleNow
from toprope.settings.sections.environment import EnvironmentSection
from toprope.workbench.catalog.opened import Opened

NEEDY = '''from toprope.sdk import Environment, Task, knob
from toprope.sdk.authoring.knobs import REQUIRED
from toprope.sdk.errors import MissingKnobs

class Needy(Environment):
    """Say a word."""

    class Knobs:
        times: int = knob(2, ge=1, le=9)
        word: str = knob(REQUIRED, help="the word to say")
        voice: str | None = knob(None, help="a voice")

    def setup(self):
        if self.knobs.voice is None:
            raise MissingKnobs("Voices here: low, high.", "voice")

    def tasks(self):
        for n in range(60):
            yield Task(f"Say {self.knobs.word} {n}", reference=f"{self.knobs.word} {n}")

    def score(self):
        return self.answer == self.task.reference
'''

SLOW = '''import pathlib, time
from toprope.sdk import Environment, Task

class Slow(Environment):
    """Loads when a file is there."""

    def setup(self):
        while not pathlib.Path({sign!r}).exists():
            time.sleep(0.02)

    def tasks(self):
        for n in range(60):
            yield Task(f"Say {{n}}", reference=str(n))

    def score(self):
        return self.answer == self.task.reference
'''


@pytest.fixture
def shop(house):
    shop, _ = house
    folder = shop.home.configuration / "environments"
    folder.mkdir(exist_ok=True)
    (folder / "needy.py").write_text(NEEDY)
    return shop


def test_missing_knobs_are_named_with_their_types_and_given_to_every_tool(shop):
    with pytest.raises(InvalidValue) as refused:
        do(select_environment, shop, name="needy")
    assert "It needs the knob word (str: the word to say)" in refused.value.message
    assert 'check_environment(name="needy", knobs={' in refused.value.hint
    with pytest.raises(InvalidValue, match=r"voice \(str \| null: a voice\)\. Voices here: low, high\."):
        do(describe_environment, shop, name="needy", knobs={"word": "yes"})
    knobs = {"word": "yes", "voice": "low"}
    assert "Say yes 0" in do(describe_environment, shop, name="needy", knobs=knobs).text
    checked = do(check_environment, shop, name="needy", knobs=knobs)
    assert checked.data.prompt_tokens["longest"] == checked.data.prompt_characters["longest"] + 3
    assert "tokens of embedded)" in checked.text
    assert checked.data.tasks_tried and 'knobs={"word": "yes", "voice": "low"}' in checked.text
    made = do(select_environment, shop, name="needy", knobs=knobs)
    draft = shop.drafts.get(made.data.draft_id)
    assert draft.config.environment.knobs == {"times": 2, **knobs}
    with pytest.raises(InvalidValue, match="between 1 and 9"):
        do(select_environment, shop, name="needy", knobs={**knobs, "times": 99})
    again = do(check_environment, shop, name=draft.id, knobs={"times": 3})
    assert again.data.draft_id == draft.id and again.data.tasks_tried


def test_a_worker_is_not_told_the_weights_of_judges(shop):
    judge = {"name": "tone", "judge": "critic", "rubric": "Be kind."}
    section = EnvironmentSection(name="needy", rewards=[judge], reward_weights={"tone": 0.5, "exact": 2.0})
    assert options_of(shop, section).reward_weights == {"exact": 2.0}


def test_other_weights_are_another_opening(shop, monkeypatch):
    """A pending opening is shared by equal calls; a corrected weight must not get the answer of the wrong one."""
    openings = []

    async def noted(workshop, entry, made, *, asked, **rest):
        openings.append(asked)

    monkeypatch.setattr(opening, "opened", noted)
    entry = shop.catalog.find("needy")
    for weights in ({"exact": 1.0}, {"exat": 1.0}, {"exact": 1.0}):
        section = EnvironmentSection(name="needy", reward_weights=weights)
        do(opening.describe, shop, entry, options_of(shop, section), examples=0, caller=Caller())
    assert openings[0] == openings[2] != openings[1]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("curriculum", {"knob": "nope", "levels": [1, 2]}, "'nope'"),
        ("curriculum", {"knob": "times", "levels": [1, 99]}, "between 1 and 9, not 99"),
        (
            "mixture",
            [{"name": "needy", "label": "more", "knobs": {"word": "no", "times": 99}}],
            "between 1 and 9, not 99",
        ),
        ("rewards", [{"name": "more", "fn": "_more.py:wrong"}], "unknown parameter 'words'"),
        ("rewards", [{"name": "score", "fn": "_more.py:right"}], "already has a reward part 'score'"),
        ("rewards", [{"name": "judged", "judge": "nobody", "rubric": "Be kind."}], "nobody"),
    ],
)
def test_settings_that_no_run_could_open_are_refused_when_they_are_edited(shop, field, value, said):
    folder = shop.home.configuration / "environments"
    (folder / "_more.py").write_text("def wrong(words): return 0.0\ndef right(answer): return 0.0\n")
    knobs = {"word": "yes", "voice": "low"}
    draft = do(select_environment, shop, name="needy", knobs=knobs).data.draft_id
    with pytest.raises((InvalidValue, EnvironmentFailed, NotFound), match=said):
        do(edit_config, shop, draft_id=draft, changes={f"environment.{field}": value})
    fine = {"environment.curriculum": {"knob": "times", "levels": [1, 9]}, "environment.reward_weights": {"more": 0.5}}
    fine["environment.rewards"] = [{"name": "more", "fn": "_more.py:right"}]
    fine["environment.mixture"] = [{"name": "needy", "label": "more", "knobs": {**knobs, "times": 9}}]
    assert do(edit_config, shop, draft_id=draft, changes=fine).data.changed


def test_knobs_of_a_check_replace_the_level_of_the_curriculum(shop, monkeypatch):
    tried = []

    async def noted(entry, options, **rest):
        tried.append(options.knobs["times"])
        raise InvalidValue("tried")

    monkeypatch.setattr(environment_check, "check", noted)
    draft = do(select_environment, shop, name="needy", knobs={"word": "yes", "voice": "low"}).data.draft_id
    changes = {"environment.curriculum": {"knob": "times", "levels": [1, 9], "measured_level": 1}}
    do(edit_config, shop, draft_id=draft, changes=changes)
    for knobs in ({"times": 3}, {"word": "no"}, None):
        with pytest.raises(InvalidValue, match="tried"):
            do(check_environment, shop, name=draft, knobs=knobs)
    assert tried == [3, 9, 9]


def test_check_that_goes_on_is_not_called_loading(shop, monkeypatch):
    done = []

    async def noted(self, key, make, *, what, **rest):
        done.append(what)
        raise NotPossibleNow(what)

    monkeypatch.setattr("toprope_tools.openings.Openings.result", noted)
    for tool in (check_environment, describe_environment):
        with pytest.raises(NotPossibleNow):
            do(tool, shop, name="needy")
    assert done == ["Checking needy", "Loading needy"]


def test_only_what_was_opened_is_called_ready(shop):
    def state(name):
        [item] = [one for one in do(list_environments, shop, query=name).data.environments if one.name == name]
        return item.state

    assert (state("needy"), state("sort_letters")) == ("not tried", "ready")
    with pytest.raises(InvalidValue):
        do(describe_environment, shop, name="needy")
    assert state("needy") == "not tried"
    shop.home.ensure()
    do(describe_environment, shop, name="needy", knobs={"word": "yes", "voice": "low"})
    assert state("needy") == "ready" and Opened(shop.home.path).read()
    with pytest.raises(InvalidValue):
        do(describe_environment, shop, name="needy")
    assert state("needy") == "ready", "knobs are the caller's"


def test_what_was_changed_or_failed_later_is_no_longer_called_ready(shop):
    folder, again = shop.home.configuration / "environments", Opened(shop.home.path)
    sign, scorer = folder / "sign", "def score(prompt, completion):\n    return float(bool(completion))\n"
    slow = SLOW.format(sign=str(sign)).replace("            time.sleep(0.02)", "            raise OSError('gone')")
    sign.touch()
    (folder / "slow.py").write_text(slow)
    (folder / "grade.py").write_text(scorer)
    (folder / "grade.jsonl").write_text("".join(f'{{"prompt": "Say {n}"}}\n' for n in range(9)))
    [grade] = [one.name for one in shop.catalog.entries() if one.ecosystem == "score"]
    shop.home.ensure()

    def states():
        return [again.state(shop.catalog.find(name)) for name in ("slow", grade)]

    for name in ("slow", grade):
        do(describe_environment, shop, name=name)
    assert states() == ["ready", "ready"]
    (folder / "grade.py").write_text(scorer + "# changed\n")
    sign.unlink()
    with pytest.raises(EnvironmentFailed, match="gone"):
        do(describe_environment, shop, name="slow")
    assert states() == ["not tried", "not tried"]
    sign.touch()
    do(describe_environment, shop, name="slow")
    assert states() == ["ready", "not tried"]
    (folder / "slow.py").write_text(slow + "# changed\n")
    assert states() == ["not tried", "not tried"]


def test_loading_outlasts_the_call_that_asked(shop, tmp_path):
    sign = tmp_path / "load"
    (shop.home.configuration / "environments" / "slow.py").write_text(SLOW.format(sign=str(sign)))
    shop.home.settings_file.write_text(yaml.safe_dump({"status": {"waits": {"hasty": 1}}}))
    told = []

    async def progress(seconds, limit, text):
        told.append((limit, text))

    async def work():
        caller = Caller(Client("hasty"), progress)
        with anyio.fail_after(60):
            with pytest.raises(NotPossibleNow, match="Loading slow goes on") as later:
                await select_environment(shop, name="slow", caller=caller)
            assert "Repeat the same call" in later.value.hint and not shop.drafts.recent()
            sign.write_text("")
            patient = Caller(Client("hasty-no-more"), progress)
            return await select_environment(shop, name="slow", caller=patient)

    made = anyio.run(work)
    assert shop.drafts.get(made.data.draft_id).environment.name == "slow"
    assert told and told[0][0] >= 3 * 120 + 4 * 60 and "Loading slow" in told[0][1]


def test_openings_wait_for_their_turn():
    live, most = [], []

    async def make():
        live.append(None)
        most.append(len(live))
        await anyio.lowlevel.checkpoint()
        live.pop()

    async def work():
        openings = Openings(most=2)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as calls:
                for number in range(9):
                    options = dict(what="x", limit_s=9.0, wait_s=60.0, caller=Caller(None))
                    calls.start_soon(partial(openings.result, str(number), make, **options))

    anyio.run(work)
    assert len(most) == 9 and max(most) == 2


def test_an_opening_that_waits_for_its_turn_says_so(monkeypatch):
    monkeypatch.setattr("toprope_tools.openings._TOLD_EVERY_S", 0.01)
    told = []

    async def work():
        openings, go, seen = Openings(most=1), anyio.Event(), anyio.Event()

        async def progress(seconds, most, text):
            told.append((seconds, most, text))
            if text.startswith("second goes on"):
                seen.set()

        def result(name, make, wait_s=60.0):
            caller = Caller(None, progress if name == "second" else None)
            return openings.result(name, make, what=name, limit_s=9.0, wait_s=wait_s, caller=caller)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as calls:
                calls.start_soon(result, "first", go.wait)
                await anyio.lowlevel.checkpoint()
                with pytest.raises(NotPossibleNow, match="second waits for its turn: 0 s so far"):
                    await result("second", seen.wait, 0.03)
                go.set()
                await result("second", seen.wait)

    anyio.run(work)
    assert told[0][1:] == (None, "second waits for its turn: 0 s so far")
    assert told[-1][2] == "second goes on: 0 of at most 9 s" and told[-1][1] > 9.0
    assert [one[0] for one in told] == sorted(one[0] for one in told)


def test_the_preset_says_how_long_loading_may_take(shop, tmp_path):
    (shop.home.configuration / "environments" / "slow.py").write_text(SLOW.format(sign=str(tmp_path / "never")))
    presets = shop.home.configuration / "presets"
    presets.mkdir(exist_ok=True)
    (presets / "brief.yaml").write_text("description: Brief.\nconfig: {environment: {load_timeout_s: 2}}\n")
    with pytest.raises(EnvironmentFailed, match="hangs or is slow"):
        do(select_environment, shop, name="slow", preset="brief")
    shop.home.settings_file.write_text("preset: brief\n")
    with pytest.raises(EnvironmentFailed, match="hangs or is slow"):
        do(check_environment, shop, name="slow")


def test_check_may_start_load_and_make_the_first_tasks_as_long_as_loading_may_take(shop, monkeypatch):
    async def opened(*_, limit_s, **__):
        raise NotPossibleNow(f"{limit_s:.0f} s")

    monkeypatch.setattr(environment_check, "opened", opened)
    with pytest.raises(NotPossibleNow, match=r"^3[6-9]\d s"):
        do(check_environment, shop, name="sort_letters")
