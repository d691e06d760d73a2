"""Trained policies for other programs: checkpoints by step, export as folders, upload, serving, and who may ask."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import AuthenticationError, OpenAI
from toprope_server.cli.app import build
from toprope_tools import data
from toprope_tools.results.results import get_results
from toprope_tools.runs.ask import policy_at
from toprope_tools.runs.training import stop_training
from toprope_tools.runs.use import evaluate_policy, serve_policy
from toprope_tools.workshop import Workshop
from typer.testing import CliRunner

from tests.support.run_engines import ECOSYSTEMS, GGUF
from tests.support.services.hub_stand_in import HubStandIn
from tests.support.tiny_policy import make_tiny_policy
from tests.support.tools_house import become, do, make_workshop, start_run
from toprope.errors import ComponentFailed, InvalidValue, LockedField, NotFound
from toprope.records.run.checkpoints import checkpoint_of, seal
from toprope.records.run.folder import RunFolder
from toprope.records.run.manifest import Manifest, Policy
from toprope.records.run.specification import AskPlan, Specification, StandardTasks
from toprope.records.run.tested_models import Measurement, add_measurement
from toprope.sdk.wall.plan import level_here
from toprope.settings.schema import Config
from toprope.training.evaluation import standard_tasks
from toprope.training.inference.sessions import UNRECORDED, session_key
from toprope.workbench.interpreters.known import Known
from toprope.workbench.launch.freeze import freeze_question
from toprope.workbench.launch.lineage import base_of, policy_named

WAIT_S = 120.0
TOKEN = "hf_right"
INSPECT_PYTHON = ECOSYSTEMS / "inspect_ai" / "bin" / "python"
CONVERTER = """
import conversion  # beside it, as llama.cpp has it
import pathlib, sys
model = pathlib.Path(sys.argv[1])
if (model / "refuse").exists(): sys.exit("no such architecture")
weights = (model / "model.safetensors").read_bytes()
assert sys.argv[2] == "--outfile" and sys.argv[4:] == ["--outtype", "auto"]
pathlib.Path(sys.argv[3]).write_bytes(b"GGUF" + weights[:8])
"""


def evaluation(label, version, successes):
    sampled = {"split": "heldout", "tasks": 100, "successes": successes}
    return {"version": 1, "label": label, "policy_version": version, "sampled": sampled, "greedy": None}


def trained(shop, steps, *, lora=False, base=None):
    """An ended run with checkpoints; each step has weights of its own."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = Config()
    config.policy.max_context, config.rollout.max_new_tokens, config.policy.lora = 64, 5, lora
    config.policy.model = str(base)
    folder = start_run(shop, config=config)
    for number in steps:
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(base)
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        place = folder.checkpoints / f"step-{number:06d}"
        model.save_pretrained(place / "model")
        AutoTokenizer.from_pretrained(base).save_pretrained(place / "model")
        (place / "state.json").write_text(
            json.dumps({"step": number, "cursor": 0, "version": 2, "policy_version": number})
        )
        seal(place)
    folder.evaluation("before").write_text(json.dumps(evaluation("before", 0, 10)))
    folder.evaluation("after").write_text(json.dumps(evaluation("after", steps[-1], 60)))
    last = {"step": steps[-1], "path": f"checkpoints/step-{steps[-1]:06d}", "cursor": 0}
    become(folder, "completed", ended_at=time.time(), checkpoint=last)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("house")


@pytest.fixture(scope="module")
def shop(place):
    shop, launcher = make_workshop(place)
    shop.home.ensure()
    shop.home.configuration.mkdir(parents=True, exist_ok=True)
    yield shop
    launcher.close()


@pytest.fixture(scope="module")
def base(place):
    folder = place / "base"
    folder.mkdir()
    return make_tiny_policy(folder)


@pytest.fixture(scope="module")
def full(shop, base):
    return trained(shop, [2, 4], base=base)


@pytest.fixture(scope="module")
def adapted(shop, base):
    return trained(shop, [3], lora=True, base=base)


@pytest.fixture
def owner(shop, place, monkeypatch):
    """Writes the owner's settings, and makes commands use this home."""
    monkeypatch.setenv("TOPROPE_HOME", str(shop.home.path))
    monkeypatch.setenv("TOPROPE_CONFIG", str(shop.home.configuration))
    yield shop.home.settings_file.write_text
    shop.home.settings_file.unlink(missing_ok=True)


def export(shop, run, **arguments):
    return asyncio.run(data.export_policy(shop, run_id=run, wait_s=WAIT_S, **arguments))


def toprope(*arguments):
    return CliRunner().invoke(build(), list(arguments), env={"COLUMNS": "200"})


def logits(folder):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.arange(4, 20)[None]).logits


def test_checkpoints_are_named_by_run_and_step(shop, full):
    runs = shop.home.runs
    assert base_of(f"run:{full.run_id}@2", runs)[1].endswith("step-000002/model")
    assert base_of(f"run:{full.run_id}", runs)[1].endswith("step-000004/model")
    assert policy_named(f"{full.run_id}@2", runs) == f"run:{full.run_id}@2"
    with pytest.raises(NotFound, match="no checkpoint of step 3") as refused:
        checkpoint_of(full, 3)
    assert "2, 4" in refused.value.hint
    with pytest.raises(InvalidValue, match="does not name a checkpoint"):
        policy_named(f"run:{full.run_id}@last", runs)


def test_policy_is_exported_with_card_of_its_step(shop, full, base):
    import torch

    answer = export(shop, full.run_id)
    folder = shop.home.exports / os.path.basename(answer.data.path)
    assert torch.equal(logits(folder), logits(full.checkpoints / "step-000004" / "model"))
    card = (folder / "README.md").read_text()
    for said in ("60.0", "10.0", "environment `sort_letters`", "library_name: transformers"):
        assert said in card
    assert str(shop.home.path) not in card and str(base) not in card
    record = json.loads((folder / "toprope.json").read_text())
    assert record["step"] == 4 and {"model.safetensors", "README.md"} <= set(record["files"])
    earlier = export(shop, f"{full.run_id}@2")
    assert "step 2 was not evaluated" in (shop.home.exports / earlier.data.path / "README.md").read_text()
    assert not torch.equal(logits(earlier.data.path), logits(folder))
    assert export(shop, full.run_id).data.path == answer.data.path


def test_adapters_are_merged_into_their_base_without_changing_the_policy(shop, adapted, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved = adapted.checkpoints / "step-000003" / "model"
    merged, alone = export(shop, adapted.run_id), export(shop, adapted.run_id, form="adapter")
    assert torch.allclose(logits(merged.data.path), logits(saved), atol=1e-4)
    assert not os.path.exists(f"{merged.data.path}/adapter_config.json")
    named = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert not torch.allclose(logits(merged.data.path), logits(named), atol=1e-2)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), alone.data.path)
    assert "library_name: peft" in Path(alone.data.path, "README.md").read_text() and loaded.peft_config


def test_half_precision_and_other_folder_by_command(shop, full, owner, tmp_path):
    import torch
    from safetensors.torch import load_file

    done = toprope("export", f"{full.run_id}@2", "--to", str(tmp_path / "mine"), "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert {one.dtype for one in load_file(tmp_path / "mine" / "model.safetensors").values()} == {torch.bfloat16}
    again = toprope("export", full.run_id, "--to", str(tmp_path / "mine"))
    assert again.exit_code == 1 and "is not empty" in again.output
    refused = toprope("export", full.run_id, "--form", "adapter")
    assert refused.exit_code == 1 and "trained full weights" in refused.output


def test_gguf_is_made_by_the_converter_of_the_owner(shop, full, adapted, owner, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidValue, match=r"no convert_hf_to_gguf\.py on the PATH"):
        export(shop, adapted.run_id, form="gguf")
    (tmp_path / "llama" / "conversion").mkdir(parents=True)
    owner(f"data: {{llama_cpp: {tmp_path / 'llama'}}}\n")
    (tmp_path / "llama" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    made = export(shop, adapted.run_id, form="gguf")
    assert sorted(os.listdir(made.data.path)) == ["README.md", "model.gguf", "toprope.json"]
    assert Path(made.data.path, "model.gguf").read_bytes()[:4] == b"GGUF"
    (tmp_path / "llama" / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such architecture')")
    with pytest.raises(ComponentFailed, match="no such architecture"):
        export(shop, full.run_id, form="gguf")


def test_uploads_need_permission_and_arrive_whole(shop, full, owner, monkeypatch):
    with HubStandIn(TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(shop.home.path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        with pytest.raises(LockedField, match="does not allow uploads to 'me/model'"):
            export(shop, full.run_id, hub="me/model")
        owner(f"data: {{hub: [me]}}\nvariables: {{export: {{HF_TOKEN: {TOKEN}}}}}\n")
        with pytest.raises(LockedField):
            export(shop, full.run_id, hub="you/model")
        done = export(shop, full.run_id, hub="me/model")
        assert done.data.url.endswith("me/model") and "me/model" in hub.private
        for name, content in hub.repositories["me/model"].items():
            assert Path(done.data.path, name).read_bytes() == content
        assert {"model.safetensors", "README.md", "config.json", "toprope.json"} <= set(hub.repositories["me/model"])
        assert hub.messages == [f"Policy of {full.run_id} at step 4"]
        owner("data: {hub: [me]}\nvariables: {export: {HF_TOKEN: hf_wrong}}\n")
        with pytest.raises(ComponentFailed, match="did not take it") as refused:
            export(shop, f"{full.run_id}@2", hub="me/other")
        assert "hf_wrong" not in str(refused.value)
        jobs = "".join(path.read_text(errors="replace") for path in shop.home.exports.rglob("*") if path.is_file())
        assert TOKEN not in jobs and "hf_wrong" not in jobs
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        owner("data: {policies: false}\n")
        with pytest.raises(LockedField, match=r"data\.policies"):
            export(shop, full.run_id)
        public = toprope("export", full.run_id, "--to", "hub", "--hub", "me/public", "--public")
        assert public.exit_code == 0, public.output
        assert "me/public" in hub.repositories and "me/public" not in hub.private


def test_trained_policy_is_served_to_openai_clients(shop, full, owner):
    named = f"{full.run_id}@2"
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "toprope_server.cli", "serve-model", named, "--engine", "transformers"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [server.stdout.readline(), server.stdout.readline()]
        assert all(lines), server.stderr.read()
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", lines[0])[0]
        key = (shop.home.configuration / "model-key").read_text().strip()
        assert key not in "".join(lines)
        client = OpenAI(base_url=url, api_key=key)
        assert [model.id for model in client.models.list()] == [named]
        asked = {"model": named, "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 6}
        said = client.chat.completions.create(**asked).choices[0].message.content
        streamed = client.chat.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in streamed) == said
        assert said == greedy(full.checkpoints / "step-000002" / "model")
        assert said != greedy(full.checkpoints / "step-000004" / "model")
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=url, api_key="wrong").models.list()
        taken = toprope("serve-model", named, "--port", url.split(":")[2].partition("/")[0])
        assert taken.exit_code == 1 and "cannot be used" in taken.output
        missing = toprope("serve-model", named, "--engine", "vllm")
        assert missing.exit_code == 1 and "vllm, which was not added" in missing.output
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        server.stdout.close()
        server.stderr.close()


def greedy(folder):
    """The answer of a policy to the question of the test, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**ids, do_sample=False, max_new_tokens=6)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True)


def test_installation_without_torch_says_what_is_missing(shop, full, owner, monkeypatch):
    monkeypatch.setattr("toprope.extras.find_spec", lambda module: None if module == "torch" else object())
    for arguments in (["export", full.run_id], ["chat", full.run_id], ["serve-model", full.run_id]):
        done = toprope(*arguments)
        assert done.exit_code == 1 and "lacks (torch)" in done.output


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


SENTENCES = """
import pathlib, sentencepiece, sys
text = pathlib.Path("text.txt")
text.write_text("\\n".join(f"the quick brown fox number {n} jumps over lazy dog {n * 7}" for n in range(400)))
sentencepiece.SentencePieceTrainer.train(
    input="text.txt", model_prefix="tokenizer", vocab_size=300, byte_fallback=True, hard_vocab_limit=False
)
"""
READ = """
import gguf, json, sys
read = gguf.GGUFReader(sys.argv[1])
tensors = {one.name: one for one in read.tensors}
embedded = tensors["token_embd.weight"]
print(json.dumps({"architecture": read.fields["general.architecture"].contents(), "tensors": len(tensors),
                  "embedded": [float(value) for value in embedded.data.reshape(-1)[:64]],
                  "norm": [float(value) for value in tensors["output_norm.weight"].data]}))
"""


@pytest.mark.engines
@pytest.mark.skipif(not GGUF.is_dir(), reason="llama.cpp's converter is not there: make test-engines")
def test_llama_cpp_converts_a_trained_policy(shop, owner, base, tmp_path):
    """The real converter. It knows tokenizers by their content, so the policy has one of SentencePiece."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    run, with_converter = trained(shop, [2], base=base), os.environ | {"PYTHONPATH": str(GGUF)}
    model = run.checkpoints / "step-000002" / "model"
    shutil.rmtree(model)
    model.mkdir()
    subprocess.run([sys.executable, "-c", SENTENCES], cwd=model, check=True, capture_output=True, env=with_converter)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        )
    ).save_pretrained(model)  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    written = {"tokenizer_class": "LlamaTokenizer", "chat_template": template, **special}
    (model / "tokenizer_config.json").write_text(json.dumps(written))
    seal(model.parent)
    owner(f"data: {{llama_cpp: {GGUF}}}\n")
    done = toprope("export", run.run_id, "--form", "gguf", "--to", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    read = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "out" / "model.gguf")],
        env=with_converter, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(read.stdout)
    weights = load_file(model / "model.safetensors")
    assert found["architecture"] == "llama" and found["tensors"] == 21
    assert found["embedded"] == pytest.approx(weights["model.embed_tokens.weight"][0].tolist(), abs=1e-3)
    assert found["norm"] == pytest.approx(weights["model.norm.weight"].tolist(), abs=1e-3)


@pytest.fixture(scope="module")
def inspect_python(place):
    """An interpreter with a stand-in for Inspect, which asks the policy; test_inspect_measures_local_tasks has the real
    one."""
    venv.create(place / "venv", symlinks=True)
    site = next((place / "venv").glob("lib/python*/site-packages"))
    (site / "inspect_ai").mkdir()
    (site / "inspect_ai" / "__main__.py").write_text(INSPECT)
    return str(place / "venv" / "bin" / "python")


@pytest.fixture
def live(shop, owner):
    """The same home with real keepers."""
    return Workshop.open(shop.home)


def test_standard_tasks_ask_the_policy_before_and_after(shop, live, full, base, inspect_python, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret-of-the-shell")
    none = toprope("eval", full.run_id, "--tasks", "gsm8k")
    assert none.exit_code == 1 and "No interpreter here has Inspect" in none.output and "env add" in none.output
    asked = ["--tasks", "words", "--limit", "3", "--python", inspect_python]
    done = toprope("eval", f"{full.run_id}@2", *asked, "--engine", "transformers")
    assert done.exit_code == 0, done.output
    logs = {}
    for path in shop.home.runs.glob("ask-*/inspect/log.json"):
        measured = Specification.read(RunFolder(path.parents[1]))
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
    measured = Measurement(names=["inspect_evals/gsm8k"], limit=1, step=None, scores=[])
    add_measurement(adapted, "ask-x", measured)
    again = start(tasks=["inspect_evals/gsm8k"])
    assert len(again.data.run_ids) == 1 and "measured on these tasks already" in again.text
    assert len(start(tasks=["inspect_evals/arc"]).data.run_ids) == 2


def test_adapters_that_were_trained_beside_vllm_are_used_without_it(shop, adapted):
    run, locks = Specification.read(adapted), shop.home.locks()
    run = run.model_copy(update={"engine_python": "/vllm/python"}, deep=True)
    run.config.inference.engine, run.config.inference.transfer = "vllm", "gpu"
    plan = AskPlan(max_new_tokens=4, asked="", serve_s=60)
    frozen = freeze_question(run, policy_at(run, checkpoint_of(adapted, 3)), locks, plan)
    assert (frozen.config.inference.engine, frozen.engine_python) == ("embedded", None)
    whole = freeze_question(run, run.config.policy, locks, plan)
    assert (whole.config.inference.engine, whole.engine_python) == ("vllm", "/vllm/python")


def test_failed_standard_tasks_are_named_without_the_key(full, tmp_path, monkeypatch, capsys):
    async def run(member, tasks, command, logs, url, key):
        return 1, f"no task is called broken; key {key}"

    async def address(name):
        return "http://127.0.0.1:1"

    monkeypatch.setattr(standard_tasks, "_run_walled", run)
    specification, folder = Specification.read(full), RunFolder.create(tmp_path, "ask-1")
    member = SimpleNamespace(
        spec=specification, secret="the secret", folder=folder, report=lambda _: None, address_async=address
    )
    tasks = StandardTasks(names=["broken"], python="python", run=full.run_id)
    plan = AskPlan(standard=tasks, max_new_tokens=4, asked="")
    with pytest.raises(ComponentFailed, match=r"no task is called broken; key \*\*\*"):
        asyncio.run(standard_tasks.measure_tasks(member, plan, tasks))
    assert session_key("the secret", UNRECORDED) not in capsys.readouterr().out
    (tmp_path / "log.json").write_text(json.dumps({"eval": {"task": "broken"}, "status": "error", "error": None}))
    with pytest.raises(ComponentFailed, match="The task broken failed: it ended as error"):
        standard_tasks.read_scores(tmp_path)


def test_agents_serve_a_policy_for_a_time(shop, live, full, owner):
    owner("data: {policies: false}\n")
    with pytest.raises(LockedField, match=r"data\.policies"):
        do(serve_policy, live, run_id=full.run_id, minutes=1)
    owner("{}")
    told = do(serve_policy, live, run_id=f"{full.run_id}@2", minutes=5)
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
    assert re.search(r"words exact/(mean|accuracy): 0 ± 0 before, 0\.5 ± \S+ after; 2 samples", done.output), (
        done.output
    )


def test_memory_is_estimated_by_command(owner):
    done = toprope("fit", "--set", "policy.lora=true", "--set", "rollout.group_size=64", "--gpus", "0")
    assert done.exit_code == 0 and "trainer" in done.output and "Memory: about" in done.output
    assert toprope("fit", "--set", "policy.lora").exit_code == 2
