"""Classify why a run failed, from a member's exit and its last log lines, so that an agent need not read the log.

A log is untrusted and long, and the cause is usually one line of it. Lines are read from last to first, because the
last error ended the program. Specific causes win over general ones wherever they stand: a trainer that prints `worker
failed` below `CUDA out of memory` ran out of memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from toprope.next_steps import Step, split
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Failure
from toprope.text_format import call

Kind = Literal[
    "out_of_memory",
    "gpu_out_of_memory",
    "cuda",
    "no_access",
    "model_not_found",
    "disk_full",
    "version_conflict",
    "import_error",
    "nan",
    "port",
    "network",
    "timeout",
    "environment_error",
    "crashed",
    "killed",
    "unknown",
]


@dataclass(frozen=True)
class Classified:
    """The kind of a failure. `evidence` is the log line that shows it; empty if the exit code or signal suffices."""

    kind: Kind
    hint: str = ""
    evidence: str = ""
    confidence: Literal["low", "medium", "high"] = "low"


@dataclass(frozen=True)
class _Cause:
    kind: Kind
    pattern: str
    hint: str
    confidence: Literal["low", "medium", "high"] = "high"

    def explains(self, line: str) -> bool:
        return compiled(self.pattern).search(line) is not None


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern once, when it is needed: every server imports this module, and few see a failure."""
    return re.compile(pattern, re.IGNORECASE)


_LESS_GPU = (
    "fork_config, then edit_config optimizer.micro_batch_size to a small divisor of the batch, "
    "optimizer.gradient_checkpointing to true, policy.lora to true or rollout.max_new_tokens lower, and start_training."
)
_LESS_MEMORY = (
    "fork_config, then edit_config rollout.concurrency and rollout.queue_groups lower, optimizer.micro_batch_size to a "
    "small divisor of the batch or policy.model to a smaller one, and start_training."
)
_DISK = (
    "Make room: `toprope doctor` shows the disk, `toprope prune` removes old runs, logging.save_total_limit keeps "
    "fewer checkpoints; then resume_training."
)

_SPECIFIC: tuple[_Cause, ...] = (
    _Cause(
        "environment_error",
        r"^\s*InvalidRequest: ",
        "fork_config, then edit_config the setting that it names, and start_training: a resume has the same settings.",
    ),
    _Cause(
        "gpu_out_of_memory",
        r"cuda out of memory|CUDA_ERROR_OUT_OF_MEMORY|cuda error: out of memory|"
        r"OutOfMemoryError.*(cuda|gpu|hip)|cublas_status_alloc_failed|no available memory for the cache blocks",
        _LESS_GPU,
    ),
    _Cause(
        "disk_full",
        r"no space left on device|errno 28\b|ENOSPC|disk quota exceeded|errno 122\b|"
        r"disk is full|database or disk is full",
        _DISK,
    ),
    _Cause(
        "out_of_memory",
        r"\bMemoryError\b|cannot allocate memory|errno 12\b|can't allocate memory|std::bad_alloc|"
        r"not enough memory|oom-kill|out of memory",
        _LESS_MEMORY,
    ),
    _Cause(
        "no_access",
        r"gated repo|GatedRepoError|access to model .* is restricted|awaiting a review|"
        r"401 client error|403 client error|invalid (user|access|api|auth\w*) token|invalid api key|incorrect api key|"
        r"(HF_TOKEN|WANDB_API_KEY|api[_ ]key)\b.*(not set|missing|required|not configured|needed)|"
        r"no api key|api_key client option must be set",
        "The owner sets the key (HF_TOKEN, WANDB_API_KEY or the endpoint's) in the settings and accepts the model's "
        "terms on its page; or fork_config, then edit_config policy.model to an open one. `toprope doctor` names the "
        "keys there are.",
    ),
    _Cause(
        "model_not_found",
        r"RepositoryNotFoundError|RevisionNotFoundError|EntryNotFoundError|404 client error|"
        r"is not a local folder and is not a valid model identifier|could not be fetched from the hugging face hub|"
        r"no file named .*(safetensors|config\.json)|is not a saved model|holds no weights|"
        r"(?<!Error: )(?-i:There is no folder)|"
        r"unrecognized model in|model type .* does not recognize|does not appear to have a file named",
        "fork_config, then edit_config policy.model and policy.revision: a Hub id, a folder with config.json, "
        "tokenizer and safetensors, or 'embedded'; then start_training.",
    ),
    _Cause(
        "cuda",
        r"no kernel image is available|device-side assert|illegal memory access|nccl error|ncclSystemError|"
        r"cudnn_status|cublas_status|no cuda gpus are available|found no nvidia driver|CUDA driver version is "
        r"insufficient|torch not compiled with cuda|cuda error|unspecified launch failure|"
        r"\bXid\b.{0,3}[(\d]|\bhip error",
        "`toprope doctor` shows driver and GPU; launcher.device cpu (fork_config, then edit_config) runs without. "
        "After a driver error of the GPU itself, resume_training goes on from the last checkpoint.",
    ),
    _Cause(
        "version_conflict",
        r"but (you have|found|got) [\w.-]+[ =]+\d|is required for a normal functioning|"
        r"requires .{1,60}(==|>=|<=|~=|<|>).{1,60}(but|which|installed)|VersionConflict|"
        r"\d\.\d.{0,60}incompatible with|incompatible with .{0,60}\d\.\d|"
        r"binary incompatibility|numpy\.dtype size changed|compiled using NumPy|undefined symbol|"
        r"GLIBC(XX)?_[\d.]+' not found|cannot import name '.*' from '(transformers|trl|peft|torch|accelerate)",
        "Two packages are incompatible: install the pinned versions (make setup), or the environment's own "
        "interpreter; then resume_training.",
    ),
    _Cause(
        "import_error",
        r"ModuleNotFoundError|No module named|ImportError|cannot import name|"
        r"cannot open shared object file",
        "A module is missing in this program's interpreter: describe_environment names what an environment needs; "
        "install it for the worker's interpreter, then start_training again.",
    ),
    _Cause(
        "nan",
        r"\bis not a number|loss (is|was|became) nan|nan (loss|gradient|in )|probability tensor contains "
        r"either|found inf or nan|(weights?|parameters?|logits) (are|is|contain)\b.{0,40}(nan|not finite)|"
        r"\bnon-?finite\b",
        "fork_config, then edit_config optimizer.learning_rate (in fine-tuning sft.learning_rate) to a third, "
        "max_grad_norm lower, and with LoRA policy.dtype to float32 if it is float16; check that the scorer's rewards "
        "are bounded. Then start_training.",
    ),
    _Cause(
        "port",
        r"address already in use|errno 98\b|EADDRINUSE|cannot assign requested address",
        "Another program uses the port: resume_training takes a new one.",
    ),
    _Cause(
        "timeout",
        r"timed out|time-?out (after|while|waiting|error|reached|exceeded|expired)|TimeoutError|TimeoutExpired|"
        r"deadline exceeded|not ready after|no answer within|did not answer within|took longer than",
        "fork_config, then edit_config the limit that ran out: environment.call_timeout_s for a slow scorer, "
        "environment.load_timeout_s for a slow load, launcher.start_timeout_s for a large model; then start_training. "
        "If the machine was only busy: resume_training.",
        "medium",
    ),
    _Cause(
        "network",
        r"name or service not known|temporary failure in name resolution|network is unreachable|"
        r"max retries exceeded|connection (refused|reset|aborted)|ConnectError|SSLError|getaddrinfo failed|"
        r"couldn't connect to|offline mode is enabled",
        "A host could not be reached: once it can, resume_training; or fork_config, then edit_config policy.model to "
        "'embedded' or a local folder and logging.wandb to offline.",
        "medium",
    ),
)
_ENVIRONMENT = _Cause(
    "environment_error",
    r"the environment (failed|raised|has no)|groups one after the other|WorkerFailure|WorkerError|the worker (died|"
    r"failed|ended)|EnvironmentMistake|LoadError|score\(\)|reset\(\)|step\(\)",
    "describe_environment shows how it loads and scores; fix its file, then start_training again.",
)
_NOT_OF_ENVIRONMENTS = ("model_not_found", "version_conflict")
_ERROR = re.compile(r"^\s*([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failure|Mistake))\b\s*:?")
_OOM_EXIT = 137
_CRASHES = {
    "SIGSEGV": "a bug in native code",
    "SIGABRT": "native code gave up",
    "SIGILL": "a CPU instruction that this machine does not have",
    "SIGFPE": "an arithmetic error in native code",
}


def prepare() -> None:
    """Compile all patterns, which takes milliseconds, so that the first failure need not wait for that."""
    for cause in (*_SPECIFIC, _ENVIRONMENT):
        compiled(cause.pattern)


def classify(
    component: str,
    exit_code: int | None = None,
    signal: str | None = None,
    excerpt: Sequence[str] = (),
    reason: str = "",
) -> Classified:
    """Classify the failure of a member.

    Args:
        component: Name of the member; an unexplained error of `environment` is attributed to user code.
        exit_code: Its exit code; None if a signal ended it or it still runs.
        signal: Name of the signal that ended it (`SIGKILL`).
        excerpt: Its last log lines, oldest first. Untrusted.
        reason: The reason that the member or its keeper gave.

    Returns:
        Kind `unknown` if nothing shows the cause.
    """
    lines = [line for text in (*excerpt, reason) for line in str(text).splitlines() if line.strip()]
    for line in reversed(lines):
        for cause in _SPECIFIC:
            if cause.kind in _NOT_OF_ENVIRONMENTS and _ENVIRONMENT.explains(line):
                continue  # an environment says such things of its own files
            if cause.explains(line):
                return Classified(cause.kind, cause.hint, line.strip()[:300], cause.confidence)
    for line in reversed(lines):
        if _ENVIRONMENT.explains(line):
            return Classified("environment_error", _ENVIRONMENT.hint, line.strip()[:300], "high")
    if signal == "SIGBUS":
        return Classified("disk_full", _DISK, "", "medium")  # a mapped file on a full disk
    if signal in _CRASHES:
        return Classified(
            "crashed",
            f"{signal}: {_CRASHES[signal]}; resume_training continues from the last checkpoint.",
            "",
            "medium",
        )
    if signal == "SIGKILL" or exit_code == _OOM_EXIT:
        return Classified(
            "killed",
            "Toprope did not send that signal; the system sends it when memory runs out. " + _LESS_MEMORY,
            "",
            "medium",
        )
    if signal is not None:
        return Classified("killed", f"Another program sent {signal}; resume_training continues.", "", "medium")
    error = next((line.strip()[:300] for line in reversed(lines) if _ERROR.match(line)), "")
    if component == "environment" and error:
        return Classified("environment_error", _ENVIRONMENT.hint, error, "medium")
    return Classified("unknown", "", error, "low")


def named(failure: Failure, folder: RunFolder) -> Failure:
    """Add the kind, its evidence and its hint to a failure; a hint of the member or keeper stays.

    Failures of the keeper keep their hint, which is more specific. Steps of the hint get the run's id, and those that
    read an empty log are left out.
    """
    if failure.kind:
        return failure
    classified = classify(failure.component, failure.exit_code, failure.signal, failure.excerpt, failure.reason)
    general = not failure.hint or failure.hint.startswith(_GENERAL)
    hint = failure.hint
    if general:
        hint = classified.hint
        if "read_logs" not in hint and failure.component != "keeper":
            hint += f" read_logs(component={failure.component!r}) shows its log."
    hint = _of_run(hint, folder) or _of_run(_NOTHING_LOGGED, folder)
    return failure.model_copy(update={"kind": classified.kind, "evidence": classified.evidence, "hint": hint})


def _of_run(hint: str, folder: RunFolder) -> str:
    """Return a hint whose steps name the run, without the sentences that propose to read an empty log."""
    sentences = []
    for sentence in re.split(r"(?<=[.;])\s+", hint.strip()):
        words = []
        for part in split(sentence, _STEPS):
            if isinstance(part, Step) and (part.tool != "read_logs" or "component" in part.arguments):
                if part.tool == "read_logs" and not has_log(folder, str(part.arguments["component"])):
                    break
                part = call(part.tool, **{"run_id": folder.run_id, **part.arguments})
            words.append(part if isinstance(part, str) else part.written)
        else:
            sentences.append("".join(words))
    text = " ".join(sentences)
    return f"{text[:-1]}." if text.endswith(";") else text


def has_log(folder: RunFolder, component: str) -> bool:
    """Return True if a component of a run has logged anything."""
    try:
        return folder.log(component).stat().st_size > 0
    except (OSError, ValueError):
        return False


_NOTHING_LOGGED = "It logged nothing: resume_training tries again; fork_config, then edit_config, tries other settings."
_STEPS = ("read_logs", "resume_training", "fork_config")
"""Tools in hints that take the id of the failed run."""
_GENERAL = ("read_logs(", "Toprope did not send that signal")
"""Beginnings of hints that only say where to look."""
