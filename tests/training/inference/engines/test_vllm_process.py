"""The command line and the output of a vLLM server."""

from __future__ import annotations

import json
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tests.support.training_api_server import until
from toprope.settings.schema import Config
from toprope.training.inference.engines.vllm_process import VllmProcess, VllmSettings


def test_key_is_in_no_argument_and_no_secret_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPROPE_SECRET", "s3cret")
    monkeypatch.setenv("HF_TOKEN", "hf_1")
    config = Config()
    config.policy.lora, config.policy.lora_rank, config.inference.sleep = True, 20, True
    config.launcher.inference_gpus = 2
    settings = VllmSettings.of(config, "/venv/bin/python", tmp_path, "cuda")
    command, variables = settings.command(tmp_path, tmp_path / "socket"), settings.variables("k3y", tmp_path)
    assert not any("k3y" in word for word in command) and variables["VLLM_API_KEY"] == "k3y"
    assert not {"TOPROPE_SECRET", "HF_TOKEN"} & set(variables)
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in variables
    line = " ".join(command)
    assert "--max-lora-rank 32" in line and "--enable-sleep-mode" in line and "--dtype bfloat16" in line
    assert "--enforce-eager" not in line and "--gpu-memory-utilization 0.4 --tensor-parallel-size 2" in line


@pytest.mark.parametrize(("device", "latent"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_kernel_that_turns_wrong_rows_of_latent_attention_is_off(tmp_path: Path, device: str, latent: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512} if latent else {}))
    line = VllmSettings("python", tmp_path, "float32", device, 64).command(tmp_path, tmp_path / "socket")
    assert any("-rotary_embedding" in word for word in line) == (latent and device == "cpu")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (
            """(Worker pid=7) ERROR 11-23 20:55:26 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=7) ERROR 11-23 20:55:26 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=7) ERROR 11-23 20:55:26 [multiproc_executor.py:953]     param = params_dict[name]
(Worker pid=7) ERROR 11-23 20:55:26 [multiproc_executor.py:953] KeyError: 'layers.1.mlp.gate'
(EngineCore pid=6) ERROR 11-23 20:55:30 [core.py:1510] Exception: WorkerProc failed. See stack trace for root cause.
(APIServer pid=5) WARNING 11-23 20:55:30 [system.py:255] This can cause errors like `OSError: Too many open files`
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}""",
            "KeyError: 'layers.1.mlp.gate'",
        ),
        (
            """    raise error
pydantic_core._pydantic_core.ValidationError: 1 validation error for EngineArgs
  Value error, No sleep here. [type=value_error]
    For further information visit a page""",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for EngineArgs Value error, No sleep "
            "here. [type=value_error] For further information visit a page",
        ),
        (
            "EngineDeadError: See root cause above.\nRuntimeError: See root cause above: {'EngineCore': -9}",
            "EngineDeadError: See root cause above.\nRuntimeError: See root cause above: {'EngineCore': -9}",
        ),
        (
            """torch.AcceleratorError: no memory
Fatal Python error: Bus error
  Current thread (most recent call first)
RuntimeError: See root cause above.""",
            "torch.AcceleratorError: no memory\nFatal Python error: Bus error Current thread (most recent call first)",
        ),
        (
            """\033[1;36m(Worker pid=7)\033[0;0m ERROR 11-23 20:55:26 [core.py:95] [rank0]: Traceback:
(Worker pid=7) ERROR 11-23 20:55:26 [core.py:95] [rank0]:     raise error
(Worker pid=7) ERROR 11-23 20:55:26 [core.py:9] [rank0]: hub.errors.Gone: \033[31mno \u202e\x07model\033[0m""",
            "hub.errors.Gone: no model",
        ),
        (
            f"ValueError: begin {'x' * 5000}\nOSError: end {'y' * 5000}",
            f"ValueError: begin {'x' * 581}…\nOSError: end {'y' * 586}…",
        ),
        (
            "ValueError: https://me:pass@x.org/ HF_TOKEN=abcdefghij 'Authorization': 'Bearer abcdefghij' "
            "sk-proj-abcdefghijklmnop hf_abcd\u200befghijklmnopqrst OUR_KEY pad_token=<|end|>",
            "ValueError: https://x.org/ HF_TOKEN=[secret] 'Authorization': 'Bearer [secret]' "
            "[secret] [secret] [secret] pad_token=<|end|>",
        ),
        ("cause\n  at one\n  at two\n\n  at three\n  at four\n  at five\n  at six", "cause"),
        ("one\ntwo\nIllegal instruction", "one\ntwo\nIllegal instruction"),
    ],
)
def test_last_words_of_a_server_are_the_cause_of_its_end(tmp_path: Path, printed: str, expected: str) -> None:
    script = f"#!/bin/sh\nsed s/OUR_KEY/$VLLM_API_KEY/ <<'END'\n{printed}\nEND\nexit 1\n"
    (program := tmp_path / "python").write_text(script)
    program.chmod(0o700)
    server = VllmProcess.start(VllmSettings(str(program), tmp_path, "float32", "cpu", 64), tmp_path)
    try:
        until(lambda: server.ended)
        assert server.last_words() == expected
    finally:
        server.end()


def test_processes_of_a_killed_server_end_and_their_shared_memory_is_deleted(tmp_path: Path) -> None:
    serve = (
        "import multiprocessing.shared_memory, pathlib, subprocess, sys, time\n"
        "if sys.argv[1] != 'worker':\n"
        f"    subprocess.Popen([sys.executable, __file__, 'worker'], stdout=open('{tmp_path}/worker', 'w'))\n"
        "else:\n"
        "    print(multiprocessing.shared_memory.SharedMemory(create=True, size=8).name, flush=True)\n"
        "time.sleep(100)\n"
    )
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{serve}")
    program.chmod(0o700)
    server = VllmProcess.start(VllmSettings(str(program), tmp_path, "float32", "cpu", 64), tmp_path)
    try:
        until(lambda: (tmp_path / "worker").is_file() and (tmp_path / "worker").read_text().endswith("\n"))
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 2, "a worker, and the tracker of its shared memory"
        server.process.kill()
        until(lambda: server.ended)
    finally:
        server.end()
    assert psutil.wait_procs(family, timeout=5)[1] == []
    with pytest.raises(FileNotFoundError):
        SharedMemory((tmp_path / "worker").read_text().strip())
