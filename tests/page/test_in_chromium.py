"""The page in Chromium, in both of its places, against real runs: the programs of `page/tests`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.page.browser import MISSING, PAGE, dashboard, ready, variables
from benchmarks.page.home import PageHome, make_home, train_on, without_live

pytestmark = [pytest.mark.engines, pytest.mark.skipif(not ready(), reason=MISSING)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageHome]:
    subprocess.run(["make", "page"], cwd=PAGE.parent, check=True, timeout=300)
    with without_live(make_home(tmp_path_factory.mktemp("page"))) as made:
        yield made


def drive(program: str, environment: dict[str, str]) -> None:
    command = ["node", "--test", "--test-reporter=tap", str(Path("tests") / program)]
    done = subprocess.run(command, cwd=PAGE, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4_000:]
    assert "# fail 0" in done.stdout and "# skipped 0" in done.stdout, done.stdout[-2_000:]


def test_sources_have_no_type_errors() -> None:
    done = subprocess.run(["npm", "run", "--silent", "check"], cwd=PAGE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_page_of_the_dashboard(home: PageHome) -> None:
    with dashboard(home) as (address, _), dashboard(home, "--read-only") as (read_only, _):
        drive("dashboard.test.mjs", variables(home, PAGE_ADDRESS=address, PAGE_READ_ONLY_ADDRESS=read_only))


def test_page_in_a_clients_frame(home: PageHome) -> None:
    train_on(home)  # the dashboard's test stopped the live run, and this one stops it, too
    drive("client.test.mjs", variables(home))
