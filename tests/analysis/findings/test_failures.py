"""Classification of failures, from real output of components."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from toprope.analysis.failures import Kind, classify, compiled, named, prepare
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Failure

TRACE = ["Traceback (most recent call last):", '  File "/opt/run/trainer.py", line 90, in run', "    model(batch)"]

CASES = [
    ("gpu_out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    (
        "gpu_out_of_memory",
        "ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization",
    ),
    ("out_of_memory", "MemoryError: Unable to allocate 8.00 GiB for an array"),
    ("out_of_memory", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ("out_of_memory", "OSError: [Errno 12] Cannot allocate memory"),
    ("cuda", "RuntimeError: CUDA error: device-side assert triggered"),
    ("cuda", "RuntimeError: Found no NVIDIA driver on your system."),
    ("cuda", "AssertionError: Torch not compiled with CUDA enabled"),
    ("no_access", "huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model x/y is restricted"),
    ("no_access", "wandb.errors.UsageError: No API key configured. Use `wandb login` to log in."),
    ("no_access", "Invalid user token. The token stored is invalid."),
    ("cuda", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    ("cuda", "RuntimeError: HIP error: invalid device function"),
    ("model_not_found", "toprope.errors.NotFound: There is no folder /models/qwen."),
    ("version_conflict", "RuntimeError: torch 2.9.0 is incompatible with torchvision 0.20.1"),
    ("no_access", "openai.OpenAIError: The api_key client option must be set either by passing api_key"),
    ("model_not_found", "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error."),
    ("model_not_found", "OSError: x/y is not a local folder and is not a valid model identifier listed on the Hub"),
    ("model_not_found", "The model 'x/y' could not be fetched from the Hugging Face Hub: 404"),
    ("disk_full", "OSError: [Errno 28] No space left on device"),
    ("disk_full", "sqlite3.OperationalError: database or disk is full"),
    ("version_conflict", "ImportError: trl>=1.16 is required for a normal functioning of this module"),
    (
        "version_conflict",
        "ImportError: cannot import name 'GRPOTrainer' from 'trl' (/opt/site-packages/trl/__init__.py)",
    ),
    ("version_conflict", "ValueError: numpy.dtype size changed, may indicate binary incompatibility."),
    ("version_conflict", "ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found (required by x.so)"),
    ("import_error", "ModuleNotFoundError: No module named 'chess'"),
    ("import_error", "OSError: libfoo.so.1: cannot open shared object file: No such file or directory"),
    ("nan", "The loss at step 9 is not a number."),
    ("nan", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"),
    ("port", "OSError: [Errno 98] error while attempting to bind on address: address already in use"),
    ("timeout", "TimeoutError: the environment did not answer within 60 s"),
    ("timeout", "Not ready after 600 s: inference."),
    ("network", "httpx.ConnectError: [Errno -3] Temporary failure in name resolution"),
    ("environment_error", "The environment failed 32 groups one after the other; the last: KeyError: 'x'"),
]


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_classify_names_failure_from_log_line(kind: str, line: str) -> None:
    found = classify("trainer", 1, None, [*TRACE, line])
    assert found.kind == kind
    assert found.evidence == line and found.hint and found.confidence != "low"


@pytest.mark.parametrize(
    "line",
    [
        "xml.etree.ElementTree.ParseError: not well-formed (invalid token): line 1, column 4",
        "ValueError: the relationship error of a and b",
        "KeyError: 'maxid'",
        "KeyError: 'xid'",
        "FileNotFoundError: there is no folder data/levels",
        "ValueError: shape (3,) is incompatible with shape (4,)",
    ],
)
def test_plain_errors_of_an_environment_stay_its_own(line: str) -> None:
    assert classify("environment", 1, None, [*TRACE, line]).kind == "environment_error"
    failed = f"The environment failed 32 groups one after the other; the last: {line}"
    assert classify("trainer", 1, None, [failed]).kind == "environment_error"


def test_advice_on_the_dtype_is_for_lora_only() -> None:
    """Without it all weights are trained in float32."""
    hint = classify("trainer", 1, None, ["The loss at step 9 is not a number."]).hint
    assert "with LoRA policy.dtype to float32" in hint


def test_classify_uses_signal_and_exit_code_without_log() -> None:
    assert classify("trainer", None, "SIGKILL", ["step 3"]).kind == "killed"
    assert classify("trainer", 137).kind == "killed"
    assert classify("inference", None, "SIGSEGV").kind == "crashed"
    assert classify("inference", None, "SIGBUS").kind == "disk_full"
    assert classify("inference", None, "SIGTERM").kind == "killed"
    assert classify("api", 3, None, ["goodbye"]).kind == "unknown"
    assert classify("trainer", None, "SIGKILL", ["MemoryError"]).kind == "out_of_memory"


def test_classify_prefers_specific_and_last_line() -> None:
    lines = ["OSError: [Errno 28] No space left on device", "WorkerFailure: the worker died"]
    assert classify("environment", 1, None, lines).kind == "disk_full"
    lines = ["warning: connection refused, trying again", "torch.OutOfMemoryError: CUDA out of memory."]
    assert classify("trainer", 1, None, lines).kind == "gpu_out_of_memory"
    # An unexplained error is the environment's fault only in the environment's process.
    assert classify("environment", 1, None, [*TRACE, "KeyError: 'x'"]).kind == "environment_error"
    other = classify("api", 1, None, [*TRACE, "KeyError: 'x'"])
    assert (other.kind, other.evidence, other.confidence) == ("unknown", "KeyError: 'x'", "low")


@pytest.mark.parametrize(
    "line",
    [
        "step 12: reward 0.98, 404 groups",
        "loading weights, 5,000 tokens, no timeouts set",
        "INFO: the finance environment is ready",
        "port 40404 is taken by us",
        "100%|████| 28/28 [00:01<00:00]",
    ],
)
def test_classify_ignores_harmless_lines(line: str) -> None:
    assert classify("trainer", 1, None, [line]).kind == "unknown"


def test_prepared_failures_are_classified_without_compiling() -> None:
    compiled.cache_clear()
    prepare()
    patterns = compiled.cache_info().misses
    assert classify("trainer", None, "SIGKILL", ["step 3"]).kind == "killed"
    assert compiled.cache_info().misses == patterns > 0


def test_every_failure_kind_is_covered() -> None:
    reached = {kind for kind, _ in CASES} | {"killed", "crashed", "unknown"}
    assert reached == set(get_args(Kind))


def failing(path: Path, component: str = "trainer", log: str = "") -> RunFolder:
    folder = RunFolder(path / "a-1")
    folder.logs.mkdir(parents=True)
    folder.log(component).write_text(log)
    return folder


def test_named_keeps_hint_of_component(tmp_path: Path) -> None:
    folder = failing(tmp_path, "inference", "No module named 'vllm'")
    own = named(
        Failure(component="trainer", reason="The loss at step 9 is not a number.", hint="Lower the rate."), folder
    )
    assert (own.kind, own.hint) == ("nan", "Lower the rate.")
    general = Failure(
        component="inference",
        reason="inference exited with code 1 while the run was starting.",
        hint="read_logs(component='inference') has what it printed.",
        exit_code=1,
        excerpt=["ModuleNotFoundError: No module named 'vllm'"],
    )
    found = named(general, folder)
    assert found.kind == "import_error" and found.evidence == "ModuleNotFoundError: No module named 'vllm'"
    assert found.hint.startswith("A module is missing")
    assert found.hint.endswith('read_logs(run_id="a-1", component="inference") shows its log.')
    assert named(found, folder) == found
    assert named(Failure(component="api", reason="api exited with code 1."), folder).kind == "unknown"


def test_steps_of_a_hint_name_the_run_and_no_empty_log(tmp_path: Path) -> None:
    folder = failing(tmp_path, "environment")
    told = "describe_environment shows how it scores; read_logs(component='environment') has the details."
    failure = Failure(component="environment", reason="It failed.", hint=told)
    assert named(failure, folder).hint == "describe_environment shows how it scores."
    folder.log("environment").write_text("KeyError")
    assert 'read_logs(run_id="a-1", component="environment") has the details' in named(failure, folder).hint
    refused = "InvalidRequest: knobby: Knob 'length' must be between 1 and 8, not 99."
    mended = named(Failure(component="environment", reason=refused), folder)
    assert mended.kind == "environment_error" and "resume_training" not in mended.hint
    assert mended.hint.startswith('fork_config(run_id="a-1"), then edit_config the setting that it names')
    silent = named(Failure(component="api", reason="api exited with code 1."), folder)
    assert silent.hint.startswith('It logged nothing: resume_training(run_id="a-1")')
    crashed = named(Failure(component="api", reason="api was killed.", signal="SIGSEGV"), folder)
    assert (
        crashed.hint
        == 'SIGSEGV: a bug in native code; resume_training(run_id="a-1") continues from the last checkpoint.'
    )


@pytest.mark.parametrize("line", [line for kind, line in CASES if kind in ("nan", "out_of_memory", "model_not_found")])
def test_settings_that_fail_are_changed_in_a_fork(tmp_path: Path, line: str) -> None:
    """A resumed run keeps its settings, and so fails again."""
    hint = named(Failure(component="trainer", reason=line), failing(tmp_path, log=line)).hint
    assert 'fork_config(run_id="a-1"), then edit_config' in hint and "resume_training" not in hint and len(hint) <= 400
