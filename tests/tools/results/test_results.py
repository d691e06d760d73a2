"""Results of live and ended runs, and the next steps that they name."""

from __future__ import annotations

import json
import time

from toprope_tools.results.results import get_results
from toprope_tools.status.status import check_status

from tests.support.tools_house import become, do, start_run, step
from toprope.atomic import write_json
from toprope.records.run.launch import Launch
from toprope.records.run.specification import SweepMember, TestPlan
from toprope.records.run.usage import Usage
from toprope.settings.schema import Config


def test_results_name_the_next_step_of_stopped_runs_and_good_tests(house):
    shop, _ = house
    folder = start_run(shop)
    now = time.time()
    become(folder, "stopped", created_at=now - 75, started_at=now - 21, ended_at=now)
    stopped = do(get_results, shop, run_id=folder.run_id).text
    assert f'Next: resume_training(run_id="{folder.run_id}") continues it. More: get_results' in stopped
    assert "after 21 s." in stopped, "the time in the queue is no time of the run"
    Usage(at=now, wall_s=42.0).write(folder)
    assert "after 42 s." in do(get_results, shop, run_id=folder.run_id).text, "an earlier attempt counts, too"
    shares = {"all_wrong_share": 0.3, "all_right_share": 0.1, "signal_share": 0.6}
    found = {"tasks": 8, "successes": 4, "rollouts": 64, "accuracy": 0.5, "split": "validation", **shares}
    plan, final = TestPlan(tasks=8, group_size=8), SweepMember(sweep="s", candidate="c001", epoch=1)
    for fields, proposed in (({"draft_id": "draft-a"}, True), ({"draft_id": "draft-a", "member": final}, False)):
        tested = start_run(shop, kind="test", test=plan, **fields)
        write_json(tested.evaluation("test"), {"version": 1, "label": "test", "sampled": found, "greedy": None})
        become(tested, "completed", ended_at=now)
        text = do(get_results, shop, run_id=tested.run_id).text
        assert ('Next: start_training(draft_id="draft-a"). More: ' in text) is proposed
        assert ("Verdict: there is signal" in text) is proposed


def test_results_of_live_run_are_of_one_moment(house):
    shop, _ = house
    folder = start_run(shop)
    step(folder, 11)
    do(check_status, shop, run_ids=[folder.run_id])
    rows = [{"step": number, "train_seconds": number / 10.0, "rollouts": 8 * number} for number in range(1, 61)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    step(folder, 60)
    limited = do(get_results, shop, run_id=folder.run_id)
    assert " 11 steps. It has not ended" in limited.text and "of training" not in limited.text
    become(folder, "training", checkpoint={"step": 20, "path": "checkpoints/step-000020"})
    measured = {"accuracy": 0.5, "tasks": 10, "successes": 5, "split": "validation"}
    write_json(
        folder.evaluation("step-40"),
        {"version": 1, "label": "step-40", "sampled": measured, "greedy": None}
        | {"policy_version": 42, "newest_version": 51},
    )
    text = do(get_results, shop, run_id=folder.run_id).text
    assert " 40 steps. It has not ended" in text and "on 10 tasks (policy versions 42 to 51)" in text


def test_results_name_sampled_rollouts_beside_those_that_were_trained_on(house):
    shop, _ = house
    folder = start_run(shop)
    step(folder, 2)
    folder.metrics.write_text("".join(json.dumps({"step": number, "rollouts": 8 * number}) + "\n" for number in (1, 2)))
    for sampled, told in ((24, "2 steps, 16 of 24 sampled rollouts"), (16, "2 steps, 16 rollouts")):
        become(folder, "completed", ended_at=time.time(), making={"begun": 3, "posted": 3, "rollouts": sampled})
        assert told in do(get_results, shop, run_id=folder.run_id).text


def test_files_of_a_mirrored_run_are_named_where_they_are_here(house):
    shop, _ = house
    folder = start_run(shop)
    become(folder, "completed", ended_at=time.time())
    far = f"/scratch/me/runs/{folder.run_id}"
    paths = {"checkpoint": f"{far}/checkpoints/step-000004", "plot": f"{far}/plot.png"}
    data = do(get_results, shop, run_id=folder.run_id).data.results
    write_json(folder.results, {**data, **paths, "checkpoint_step": 4})
    (folder.path / "plot.png").touch()
    for mirror, plot in (("", paths["plot"]), ("127.0.0.1:1", f"{folder.path}/plot.png")):
        job = {"kind": "slurm", "attempt": 1, "name": "x", "submitted_at": 0, "deadline": 0}
        Launch(cluster="lab", mirror=mirror, **job).write(folder)
        text = do(get_results, shop, run_id=folder.run_id).text
        assert f"Plot: {plot}\n" in text and f"Checkpoint: {paths['checkpoint']} (step 4)" in text


def test_files_of_trackers_on_a_mirrored_cluster_are_not_said_to_be_here(house):
    shop, _ = house
    config = Config()
    config.logging.wandb = "offline"
    folder = start_run(shop, config=config)
    become(folder, "training")
    step(folder, 10)
    there = {"folder": "/scratch/run/wandb", "folders": ["/scratch/run/wandb"]}
    tracked = {"wandb": there, "tensorboard": {"folder": "/scratch/run/tensorboard"}}
    write_json(folder.path / "trackers.json", {"version": 1, "trackers": tracked})
    job = {"kind": "slurm", "attempt": 1, "name": "a.1", "submitted_at": 0.0, "deadline": 0.0}
    Launch(cluster="lab", mirror="127.0.0.1:1", **job).write(folder)
    [told] = do(check_status, shop, run_ids=[folder.run_id]).data.runs
    assert told.trackers["tensorboard"] == "/scratch/run/tensorboard (on the cluster lab)"
    upload = "offline; this uploads it{}: wandb sync /scratch/run/wandb"
    assert upload.format(", on the cluster lab") in do(get_results, shop, run_id=folder.run_id).text
    folder.launch.unlink()
    assert upload.format("") in do(get_results, shop, run_id=folder.run_id).text
