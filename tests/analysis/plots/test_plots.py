"""The plot of a run, drawn by its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

from tests.analysis.conftest import evaluation, rows
from tests.support import records
from toprope.analysis.plots.run_plots import _draw_heldout
from toprope.analysis.plots.style import REWARD, SUCCESS, colour_of, smoothed
from toprope.analysis.reports.charts import Line, lines
from toprope.analysis.reports.results import Accuracy, Evaluation, Results
from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Status


@pytest.fixture
def folder(tmp_path):
    return records.run_folder(tmp_path / "runs", records.specification(), "evaluating")


def draw(folder: RunFolder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error", "-m", "toprope.analysis.plots", str(folder.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def pixels(folder: RunFolder) -> tuple[int, int, set[bytes]]:
    """Return width, height and colours of the plot."""
    from PIL import Image

    with Image.open(folder.plot) as image:
        found = image.convert("RGB").getcolors(image.width * image.height)
    return image.width, image.height, {bytes(colour) for _, colour in found}


def test_plot_draws_rewards_successes_and_accuracies(folder):
    for label, wins in (("before", 5), ("after", 150)):
        write_json(folder.evaluation(label), evaluation(label, wins, wins))
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows(50)))
    done = draw(folder)
    assert done.returncode == 0, done.stderr
    width, height, colours = pixels(folder)
    assert (width, height) == (1200, 700)
    assert {bytes.fromhex(colour) for colour in ("c2571a", "1f6f8b", "5b6570")} <= colours
    assert not list(folder.path.glob(".plot*"))


@pytest.mark.parametrize(
    ("split", "title"), [("train", "Training"), ("validation", "Validation"), ("heldout", "Held-out")]
)
def test_plot_names_the_tasks_that_an_accuracy_is_of(split, title):
    titles = []
    axes = MagicMock()
    axes.set_title = titles.append
    measured = Accuracy(accuracy=0.5, low=0.4, high=0.6, tasks=90)
    evaluations = {label: Evaluation(split=split, sampled=measured) for label in ("before", "after")}
    _draw_heldout(axes, Results.model_construct(evaluations=evaluations))
    assert titles == [f"{title} accuracy, 95 % intervals"]
    axes.set_xlabel.assert_called_once_with("90 tasks that training never saw" if title == "Held-out" else "90 tasks")


def test_run_without_measurements_still_gets_a_plot(folder):
    done = draw(folder)
    assert done.returncode == 0, done.stderr
    _, _, colours = pixels(folder)
    assert bytes.fromhex("c2571a") not in colours


def test_plot_of_missing_run_fails_with_reason(tmp_path):
    done = draw(RunFolder(tmp_path / "none"))
    assert done.returncode == 1 and "has no specification" in done.stderr


def test_equal_reward_and_success_are_one_line_and_neither_hides_the_other(folder):
    equal = [{**row, "reward": row["success"]} for row in rows(50)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in equal))
    assert draw(folder).returncode == 0
    reward, success = bytes.fromhex("c2571a"), bytes.fromhex("1f6f8b")
    assert reward not in pixels(folder)[2] and success in pixels(folder)[2]
    near = [{**row, "reward": row["success"] + 0.01} for row in rows(50)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in near))
    assert draw(folder).returncode == 0
    assert {reward, success} <= pixels(folder)[2]


def test_metrics_have_one_colour_in_plots_and_reports():
    wanted = [Line("success", "success"), Line("reward", "reward")]
    points = [{"step": step, "reward": 0.1, "success": 0.3} for step in range(9)]
    chart = lines("both", points, wanted)
    assert chart is not None and "#c2571a" in chart and "#1f6f8b" in chart
    alone = lines("one", points, wanted[1:])
    assert alone is not None and "#c2571a" in alone and "#1f6f8b" not in alone
    assert [colour_of(name, 3) for name in ("reward", "success")] == [REWARD, SUCCESS]


def test_smoothing_keeps_length_and_level():
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [1.5, 2.0, 3.0, 4.0, 4.5]
    assert smoothed([2.0] * 7, 4) == [2.0] * 7
    assert smoothed([3.0], 9) == [3.0] and smoothed([], 5) == [] and smoothed([1.0, 5.0], 1) == [1.0, 5.0]


def test_plot_of_fine_tuning_draws_its_own_loss(folder):
    status = Status.read(folder)
    status.model_copy(update={"kind": "sft"}).write(folder)
    lines = [{"step": step, "loss": 3 / step, "mean_token_accuracy": 1 - 1 / step} for step in range(1, 60)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    done = draw(folder)
    assert done.returncode == 0, done.stderr
    _, _, colours = pixels(folder)
    assert {bytes.fromhex("a13d63"), bytes.fromhex("5f8f3e")} <= colours
