"""Shared by all tests: an environment that does not depend on the caller's, and a tiny policy.

The tests must pass in a terminal, in the background, under nohup and in cron, and their children inherit all they find
there: ignored signals, the terminal's size and type, the locale.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

gc.disable()  # it takes a third of the time of collecting tests, which import all that the product needs

from tests.support.tiny_policy import make_tiny_policy  # noqa: E402 - it imports torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
os.environ.update(TERM="dumb", LANG="C.UTF-8", LC_ALL="C.UTF-8")
# A shell ignores SIGINT and SIGQUIT for background jobs, nohup ignores SIGHUP. Children inherit that across exec, but
# not a handler: with one that does nothing this process still ignores the signal and its children start with defaults.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_collection_finish() -> None:
    """Switch the garbage collector on again; loaded modules stay, so it does not visit them."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, the whole product's before others, so that no process is left alone with one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name != "whole"))


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer, a chat template and a small random Llama."""
    return make_tiny_policy(tmp_path_factory.mktemp("tiny-policy"))
