"""Make a small home as the installed version of Toprope leaves it, for tests that newer versions still read it.

    python -P tests/data/homes/make_home.py HOME OUTPUT.tar.xz

HOME must not exist; run it at a neutral path, because records name absolute paths. Run this with each release, and keep
the archive beside this file. It works with all earlier versions: tools that a version lacks are left out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

SETTINGS = """\
# The settings of this machine.
variables:
  trainer:
    GREETING: "hello"  # needed by nobody
preset: mine  # with fewer steps
status: {min_s: 0}
"""
LOCKS = """\
locks:
  # Nobody needs more here.
  - field: budget.steps
    max: 50
    reason: A small machine.
"""
PRESET = """\
description: Small.
config:
  logging:
    keep_rollouts: true  # all of them
  algorithm:
    seed: 7
    drop_zero_signal: false
"""
CHANGES = {
    "budget.steps": 3,
    "optimizer.warmup_steps": 0,
    "budget.max_train_seconds": None,
    "policy.max_context": 128,
    "rollout.group_size": 2,
    "rollout.groups_per_step": 2,
    "rollout.max_new_tokens": 4,
    "evaluation.heldout_tasks": 4,
    "evaluation.greedy": False,
}


def make_policy(folder: Path) -> None:
    """Write a random policy of 6,000 parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<pad>": 0, "<eos>": 1, "<user>": 2, "<bot>": 3} | {letter: at + 4 for at, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": ["<user>", "<bot>"]}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **tokens).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(words), max_position_embeddings=256, tie_word_embeddings=True, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)


async def fill(home: Path) -> None:
    """Let a server leave runs, drafts, an experiment, a data set and a sweep in the home."""
    module = "server.cli" if importlib.util.find_spec("server") else "toprope_server.cli"
    variables = {"TOPROPE_HOME": str(home / "data"), "TOPROPE_CONFIG": str(home / "config")}
    variables |= {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    server = StdioServerParameters(command=sys.executable, args=["-P", "-m", module, "serve"], env=variables)
    async with Client(server) as client:
        offered = {tool.name: set(tool.input_schema["properties"]) for tool in (await client.list_tools()).tools}

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            answer = await client.call_tool(tool, arguments)
            print(f"{tool}: {' '.join(block.text for block in answer.content)[:300]}", flush=True)
            assert not answer.is_error and answer.structured_content is not None
            return answer.structured_content

        async def end_of(run_id: str) -> None:
            while True:
                told = await call("check_status", run_ids=[run_id], wait_s=30)
                if told["runs"][0]["state"] in ("completed", "failed", "stopped", "lost"):
                    assert told["runs"][0]["state"] == "completed"
                    return

        draft = (await call("select_environment", name="number_guess"))["draft_id"]
        await call("edit_config", draft_id=draft, changes=CHANGES | {"policy.model": str(home / "policy")})
        tested = await call("test_inference", draft_id=draft, tasks=2, group_size=2)
        await end_of(tested["run_id"])
        run_id = (await call("start_training", draft_id=draft, name="first"))["run_id"]
        await end_of(run_id)
        await call("get_results", run_id=run_id)
        await call("edit_config", draft_id=draft, changes={"optimizer.learning_rate": 0.001})
        if "undo_edit" in offered:
            await call("undo_edit", draft_id=draft, revision=2)
        if "note_experiment" in offered:
            await call("note_experiment", hypothesis="It learns within three steps.", run_ids=[run_id])
        if "build_dataset" in offered:
            await call("build_dataset", name="kept", sources=[run_id])
        if "start_sweep" in offered:
            space = {"optimizer.learning_rate": {"choices": [0.0001, 0.001]}}
            sweep = await call("start_sweep", draft_id=draft, space=space, strategy="random", population=2, epochs=1)
            await end_of(sweep["run_id"])


def pack(home: Path, output: Path) -> None:
    """Archive the home without temporary files, weights in flight and caches."""

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = member.name.split("/")
        if {"crew", "__pycache__", "interpreters", "homes"} & set(parts) or member.name.endswith(".png"):
            return None
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(output, "w:xz") as archive:
        archive.add(home, "home", filter=wanted)


def main() -> None:
    """Make and pack the home that the command line names."""
    home, output = Path(sys.argv[1]), Path(sys.argv[2])
    (home / "config" / "presets").mkdir(parents=True)
    (home / "config" / "settings.yaml").write_text(SETTINGS)
    (home / "config" / "locks.yaml").write_text(LOCKS)
    (home / "config" / "presets" / "mine.yaml").write_text(PRESET)
    (home / "policy").mkdir()
    make_policy(home / "policy")
    anyio.run(fill, home)
    pack(home, output)
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
