"""Standard tasks with a trained policy, and its answers to other programs, in runs that agents start."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import venv
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import AuthenticationError, OpenAI
from toprope_tools.results.results import get_results
from toprope_tools.runs import use
from toprope_tools.runs.ask import policy_at
from toprope_tools.runs.training import stop_training
from toprope_tools.runs.use import evaluate_policy, serve_policy

from tests.support.run_engines import ECOSYSTEMS
from tests.support.tools_house import become, do, start_run
from tests.tools.policies.house import export, greedy, toprope
from toprope.errors import InvalidValue, LockedField, NotFound, NotPossibleNow
from toprope.records.messages import Evaluated, Finished, Progress
from toprope.records.run.checkpoints import checkpoint_of
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import note_kept, wanted
from toprope.records.run.manifest import Manifest, Policy
from toprope.records.run.specification import AskPlan, Specification, StandardTasks
from toprope.records.run.tested_models import Measurement, StandardScore, add_measurement, read_served, served_key
from toprope.sdk.wall.plan import level_here
from toprope.training.evaluation import questions
from toprope.training.inference.sessions import UNRECORDED, session_key
from toprope.workbench.interpreters.known import Known
from toprope.workbench.launch.freeze import freeze_question
from toprope.workbench.launch.open_runs import variables_to_resume

INSPECT_PYTHON = ECOSYSTEMS / "inspect_ai" / "bin" / "python"
INSPECT = """
import json, os, pathlib, sys, urllib.request
given = [word for word in sys.argv[1:] if word != "--no-fail-on-error"]
try: reads = bool(pathlib.Path("..", "spec.json").read_text())
except OSError: reads = False
tasks, options = given[1 : given.index("--model")], dict(zip(*[iter(given[given.index("--model") :])] * 2))
assert given[0] == "eval" and options["--log-format"] == "json" and "SOME_TOKEN" not in os.environ
name = options["--model"].removeprefix("openai-api/toprope/")
body = {"model": name, "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 6}
key = {"Authorization": "Bearer " + os.environ["TOPROPE_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["TOPROPE_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), key)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
score = {"name": "match", "metrics": {"accuracy": {"value": len(said)}, "stderr": {"value": 0.5}}}
results = {"total_samples": 3, "completed_samples": 2, "scores": [score]}
log = {"eval": {"task": tasks[0]}, "status": "success", "results": results}
pathlib.Path(options["--log-dir"], "log.json").write_text(json.dumps(log | {"said": said, "reads": reads}))
"""


@pytest.fixture(scope="module")
def inspect_python(place):
    """An interpreter with a stand-in for Inspect, which asks the policy; test_inspect_measures_local_tasks has the real
    one."""
    venv.create(place / "venv", symlinks=True)
    site = next((place / "venv").glob("lib/python*/site-packages"))
    (site / "inspect_ai").mkdir()
    (site / "inspect_ai" / "__main__.py").write_text(INSPECT)
    return str(place / "venv" / "bin" / "python")


def test_standard_tasks_ask_the_policy_before_and_after(shop, live, full, base, inspect_python, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret-of-the-shell")
    none = toprope("eval", full.run_id, "--tasks", "gsm8k")
    assert none.exit_code == 1 and "No interpreter here has Inspect" in none.output and "env add" in none.output
    asked = ["--tasks", "words", "--limit", "3", "--python", inspect_python]
    done = toprope("eval", f"{full.run_id}@2", *asked, "--engine", "transformers")
    assert done.exit_code == 0, done.output
    logs = {}
    for path in shop.home.runs.glob("ask-*/inspect/*/log.json"):
        measured = Specification.read(RunFolder(path.parents[2]))
        assert measured.config.inference.engine == "transformers"
        logs[measured.ask.standard.step] = json.loads(path.read_text())
    assert logs[None]["said"] == greedy(base) != logs[2]["said"] == greedy(full.checkpoints / "step-000002" / "model")
    assert not any(log["reads"] for log in logs.values()) or level_here()[0] == "none"
    first, last = (f"{len(logs[side]['said'])} ± 0.5" for side in (None, 2))
    line = f"{first} before training (3 samples, 1 of them failed); {last} at step 2 (3 samples, 1 of them failed)."
    assert f"words match/accuracy: {line}" in done.output
    told = do(get_results, live, run_id=full.run_id)
    assert f"Standard task words match/accuracy: {line}" in told.text
    assert [one.get("step") for one in told.data.results["standard"]] == [None, 2]
    cards = {step: Path(export(shop, f"{full.run_id}@{step}").data.path, "README.md").read_text() for step in (2, 4)}
    assert f"`words` `match/accuracy`: {line}" in cards[2]
    assert "3 samples" in cards[4] and "at step 2" not in cards[4]


@pytest.mark.parametrize("ending", ["", "@6"])
def test_checkpoint_that_a_cluster_keeps_is_asked_for(shop, ending):
    folder = start_run(shop)
    note_kept(folder, {"step-000006": 7_000_000})
    last = {"step": 6, "path": "checkpoints/step-000006", "cursor": 0}
    become(folder, "completed", ended_at=time.time(), checkpoint=last)
    with pytest.raises(NotPossibleNow, match=f"Step 6 of {folder.run_id} is on its cluster; it was asked for"):
        do(evaluate_policy, shop, run_id=f"{folder.run_id}{ending}", tasks=["inspect_evals/gsm8k"])
    assert wanted(folder) == ["step-000006"]


def test_agents_start_standard_tasks_of_packages_alone(shop, full, adapted, owner, inspect_python, monkeypatch):
    start = partial(do, evaluate_policy, shop, run_id=adapted.run_id, limit=1)
    for name in ("/tmp/mine.py@words", "mine.py", "a/../b", "inspect_evals/gsm8k@x", "--model"):
        with pytest.raises(InvalidValue, match="not a task of an installed package"):
            start(tasks=[name])
    with pytest.raises(NotFound, match="No interpreter here has Inspect"):
        start(tasks=["inspect_evals/gsm8k"])
    known = Known("inspect_ai", inspect_python, next(Path(inspect_python).parents[1].glob("lib/python*/site-packages")))
    monkeypatch.setattr("toprope_tools.runs.use.known_interpreters", lambda added: [known])
    begun = Manifest.model_construct(run_id=adapted.run_id, policy=Policy(model="me/model", revision="a" * 40))
    monkeypatch.setattr(Manifest, "read", lambda folder: begun if folder.run_id == adapted.run_id else None)
    (shop.home.configuration / "locks.yaml").write_text(
        "locks: [{field: rollout.max_new_tokens, max: 4, reason: Short.}]\n"
    )
    started = start(tasks=["inspect_evals/gsm8k"])
    (shop.home.configuration / "locks.yaml").unlink()
    after, before = (Specification.read(shop.runs.folder(one)) for one in started.data.run_ids)
    model = str(adapted.checkpoints / "step-000003" / "model")
    assert (after.config.policy.model, after.config.policy.revision) == (model, None)
    assert before.config.policy.model == Specification.read(adapted).config.policy.model
    assert before.config.policy.revision == "a" * 40 and not before.config.policy.lora
    assert after.ask.standard.python == inspect_python and after.ask.max_new_tokens == 4
    score = StandardScore(task="gsm8k", metric="m", value=1, samples=1, failed=0)
    same = {"temperature": 0.0, "max_new_tokens": 5, "engine": before.config.inference.engine}
    wrong = (
        {"temperature": 1.0},
        {"max_new_tokens": 9},
        {"engine": "vllm"},
        {"scores": [score.model_copy(update={"failed": 1})]},
    )
    for different in (*wrong, {}):
        given = {"names": ["inspect_evals/gsm8k"], "limit": 1, "step": None, "scores": [score], **same, **different}
        add_measurement(adapted, "ask-x", Measurement.model_validate(given))
        again = start(tasks=["inspect_evals/gsm8k"])
        assert len(again.data.run_ids) == 1 + bool(different), different
        assert ("measured on these tasks already" in again.text) == (not different)
    assert len(start(tasks=["inspect_evals/arc"]).data.run_ids) == 2


def test_thousands_of_scores_fit_an_answer(shop, adapted):
    scores = [StandardScore(task="t", metric="m" * 90 + str(n), value=n, samples=1, failed=0) for n in range(3001)]
    add_measurement(adapted, "ask-many", Measurement(names=["t"], limit=1, step=3, scores=scores))
    told = do(get_results, shop, run_id=adapted.run_id)  # which holds the budget
    assert "scores left out: " in told.text
    (adapted.path / "standard" / "ask-many.json").unlink()


def test_adapters_that_were_trained_beside_vllm_are_used_without_it(shop, adapted):
    run, locks = Specification.read(adapted), shop.home.locks()
    run = run.model_copy(update={"engine_python": "/vllm/python"}, deep=True)
    run.config.inference.engine, run.config.inference.transfer = "vllm", "gpu"
    plan = AskPlan(max_new_tokens=4, asked="", serve_s=60)
    frozen = freeze_question(run, policy_at(run, checkpoint_of(adapted, 3)), locks, plan)
    assert (frozen.config.inference.engine, frozen.engine_python) == ("embedded", None)
    whole = freeze_question(run, run.config.policy, locks, plan)
    assert (whole.config.inference.engine, whole.engine_python) == ("vllm", "/vllm/python")


def test_resumption_is_held_to_newer_permissions(shop, full, owner):
    run, locks = Specification.read(full), shop.home.locks()
    tasks = StandardTasks(names=["inspect_evals/gsm8k"], python="python", run=full.run_id)
    served, asked = (
        freeze_question(run, policy_at(run, checkpoint_of(full, 2)), locks, AskPlan(max_new_tokens=4, asked="", **use))
        for use in ({"serve_s": 60}, {"standard": tasks})
    )
    for one in (served, asked):
        variables_to_resume(shop.home, one)
    owner("data: {policies: false}\n")
    with pytest.raises(LockedField, match=r"data\.policies"):
        variables_to_resume(shop.home, served)
    file = shop.home.configuration / "locks.yaml"
    file.write_text("locks: [{field: environment.network, value: deny, reason: No calls.}]\n")
    try:
        with pytest.raises(LockedField, match="No calls"):
            variables_to_resume(shop.home, asked)
    finally:
        file.unlink()


def test_agents_serve_a_policy_for_a_time(shop, live, full, owner, monkeypatch):
    in_loop = []

    def noted(function):
        def called(*arguments):
            in_loop.append(threading.current_thread() is threading.main_thread())
            return function(*arguments)

        return called

    monkeypatch.setattr(use, "read_served", noted(use.read_served))
    monkeypatch.setattr(use, "require_policies", noted(use.require_policies))
    owner("data: {policies: false}\n")
    with pytest.raises(LockedField, match=r"data\.policies"):
        do(serve_policy, live, run_id=full.run_id, minutes=1)
    owner("{}")
    told = do(serve_policy, live, run_id=f"{full.run_id}@2", minutes=5)
    assert len(in_loop) > 2 and not any(in_loop)  # files are not read in the server's event loop
    key = Path(told.data.key_file).read_text().strip()
    assert key not in told.text + told.data.model_dump_json() and told.data.url in told.text
    client = OpenAI(base_url=told.data.url, api_key=key)
    asked = {"model": "any", "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 6}
    said = client.chat.completions.create(**asked).choices[0].message.content
    assert said == greedy(full.checkpoints / "step-000002" / "model")
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=told.data.url, api_key="wrong").models.list()
    with pytest.raises(AuthenticationError):  # the key opens questions alone
        OpenAI(base_url=told.data.url, api_key=key).get("/policy", cast_to=object)
    assert told.data.url in do(get_results, live, run_id=told.data.run_id).text
    do(stop_training, live, run_id=told.data.run_id)
    assert do(live.runs.wait_end, told.data.run_id, 60).state == "stopped"
    assert not Path(told.data.key_file).exists()
    assert told.data.url not in do(get_results, live, run_id=told.data.run_id).text


def test_served_policy_follows_its_address_and_ends_by_itself(tmp_path, monkeypatch):
    folder, reports, addresses = RunFolder.create(tmp_path, "ask-1"), [], iter(["http://a", None])
    monkeypatch.setattr(questions, "_LOOK_S", 0.01)
    member = SimpleNamespace(
        secret="the secret",
        folder=folder,
        ending=threading.Event(),
        peer=lambda name: next(addresses, "http://b"),
        report=reports.append,
    )
    asyncio.run(questions._serve(member, 0.2))
    served = read_served(folder)
    assert served.url == "http://b/v1" and 0 < served.until - time.time() + 0.2 < 10
    assert served_key(folder).read_text().strip() == session_key("the secret", UNRECORDED)
    assert served_key(folder).stat().st_mode & 0o077 == 0
    assert [type(one) for one in reports] == [Progress, Evaluated, Finished]
    member.ending.set()
    asyncio.run(asyncio.wait_for(questions._serve(member, 3600.0), 5))


@pytest.mark.engines
@pytest.mark.skipif(not INSPECT_PYTHON.exists(), reason="Inspect is not there: make test-engines")
def test_inspect_measures_local_tasks(shop, full, owner, tmp_path, monkeypatch):
    """Real Inspect, with data in a file: the target of the second sample is what the trained policy says."""
    said = greedy(full.checkpoints / "step-000002" / "model")
    rows = [{"input": "ab", "target": "never"}, {"input": "ab", "target": said}]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    (tmp_path / "words.py").write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import json_dataset\n"
        "from inspect_ai.scorer import exact\nfrom inspect_ai.solver import generate\n\n"
        "@task\ndef words():\n"
        f"    return Task(dataset=json_dataset({str(tmp_path / 'data.json')!r}), solver=generate(max_tokens=6), "
        "scorer=exact())\n"
    )
    monkeypatch.chdir(tmp_path)
    done = toprope("eval", f"{full.run_id}@2", "--tasks", "words.py@words", "--python", str(INSPECT_PYTHON))
    assert done.exit_code == 0, done.output
    line = r"words exact/(mean|accuracy): 0 ± 0 before training \(2 samples\); 0\.5 ± \S+ at step 2 \(2 samples\)\."
    assert re.search(line, done.output), done.output
