"""Slurm and Ray by their recorded answers: Slurm 22.05.8 and Ray 2.60.0, each of two nodes."""

from __future__ import annotations

import json
import re
import subprocess

import httpx2 as httpx
import pytest

from toprope.settings.clusters import Cluster
from toprope.settings.sections.launcher import LauncherSection
from toprope.supervisor.launchers.engine import JobRequest, QueueFull, Refused, Unreachable
from toprope.supervisor.launchers.ray import RayEngine
from toprope.supervisor.launchers.slurm import SlurmEngine

QUEUE = """\
1|COMPLETED|2026-11-23T00:37:56|n1|n1|None|sbatch
2|PENDING|N/A||n/a|PartitionNodeLimit|sbatch
5|PENDING|2026-11-23T01:08:09||n/a|Resources|w
4|RUNNING|2026-11-23T00:37:59|n[1-2]|n1|None|big
6|NODE_FAIL|2026-11-23T00:38:01|n1|n1|NodeDown|dead
7|COMPLETING|2026-11-23T00:38:02|n2|n2|None|going
"""
NO_PARTITION = (
    "sbatch: error: invalid partition specified: nowhere\n"
    "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
)
OVER_QUOTA = (
    "sbatch: error: rl has used up its quota of sockets; try again next month\n"
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
    "and/or time limits)\n"
)
NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
WAITS = "Job has not started yet. It may be waiting for resources (CPUs, GPUs, memory, custom resources)."
LISTED = [
    {"submission_id": "a.1", "status": "SUCCEEDED", "message": "Job finished successfully.", "driver_exit_code": 0},
    {"submission_id": "b.1", "status": "PENDING", "message": WAITS, "driver_exit_code": None},
    {"submission_id": "c.1", "status": "RUNNING", "message": "Job is currently running.", "driver_exit_code": None},
    {"submission_id": None, "job_id": "01000000", "status": "RUNNING", "message": None},
]


@pytest.fixture
def request_(tmp_path):
    launcher = LauncherSection(nodes=2, features=["ib", "a100"], account="rl", resources={"trainer": {"gpus": 1}})
    return JobRequest("run-1.1", ["/venv/bin/python", "a b"], tmp_path, tmp_path / "keeper.log", launcher)


class Commands:
    """Answers by program; keeps what was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, command, text, variables):
        self.asked.append((list(command), text, dict(variables)))
        answer = self.answers[command[0].rpartition("/")[2]]
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)


def slurm(**answers):
    """A Slurm that expands each list of nodes to n1 and n2 unless told otherwise."""
    commands = Commands(
        **{"squeue": (0, QUEUE, ""), "scancel": (0, "", ""), "scontrol": (0, "n1\nn2\n", ""), **answers}
    )
    return SlurmEngine(Cluster(kind="slurm", setup=("module load cuda",), config="/etc/lab.conf"), commands), commands


def test_slurm_tells_jobs_by_name():
    engine, _ = slurm()
    jobs = engine.jobs()
    assert (jobs["w"].phase, jobs["w"].told) == ("waiting", "Resources, estimated start 2026-11-23 01:08")
    assert (jobs["sbatch"].handle, jobs["sbatch"].told.partition(";")[0]) == ("2", "PartitionNodeLimit")
    assert (jobs["big"].phase, jobs["big"].told) == ("running", "")
    assert (jobs["dead"].phase, jobs["dead"].told) == ("ended", "NODE_FAIL (NodeDown) on n1")
    assert jobs["going"].phase == "ending"


def test_slurm_wait_that_never_ends_is_told_with_its_remedy():
    queue = "3|PENDING|N/A||n/a|PartitionTimeLimit|long\n4|PENDING|N/A||n/a|PartitionNodeLimit|wide\n"
    jobs = slurm(squeue=(0, queue, ""))[0].jobs()
    assert jobs["long"].told.endswith("will not start so: stop it, and lower launcher.time_limit_minutes")
    assert jobs["wide"].told.endswith("lower launcher.nodes, unless nodes of the partition are down"), "it means both"


@pytest.mark.parametrize(("minutes", "warned_s"), [(0, 60), (1, 30), (2, 60), (90, 60)])
def test_slurm_warns_a_short_job_after_half_of_its_time(request_, minutes, warned_s):
    engine, commands = slurm(sbatch=(0, "12;lab\n", ""))
    request_.launcher.time_limit_minutes = minutes
    engine.submit(request_)
    assert f"--signal=B:USR1@{warned_s}" in commands.asked[-1][0]


@pytest.mark.parametrize(
    ("cluster", "silence", "says"),
    [
        ({}, FileNotFoundError(2, "No such file"), "no squeue on the server's PATH; `commands` in clusters.yaml"),
        ({"commands": "/opt/slurm"}, FileNotFoundError(2, "No such file"), "no squeue in /opt/slurm"),
        ({"config": "/nowhere/slurm.conf"}, subprocess.TimeoutExpired("squeue", 20), "no file /nowhere/slurm.conf"),
    ],
)
def test_slurm_that_cannot_be_asked_names_the_setting(cluster, silence, says):
    with pytest.raises(Unreachable, match=says):
        SlurmEngine(Cluster(kind="slurm", **cluster), Commands(squeue=silence)).jobs()


def test_slurm_job_without_the_node_of_its_keeper_has_ended_but_holds_nodes():
    """Slurm goes on calling it RUNNING, because the run's other nodes must survive the loss of one."""
    queue = QUEUE + "8|RUNNING|2026-11-23T01:59:52|n2|n1|None|one\n9|RUNNING|2026-11-23T01:59:52|n[2-3]|n1|None|rest\n"
    engine, commands = slurm(squeue=(0, queue, ""), scontrol=(0, "n2\nn3\n", ""))
    jobs = engine.jobs()
    for name in ("one", "rest"):
        assert (jobs[name].phase, jobs[name].told) == ("ended", "its first node n1 failed") and jobs[name].holds_nodes
    assert not any(jobs[name].holds_nodes for name in ("sbatch", "w", "dead", "going"))
    asked = len(commands.asked)
    engine.jobs()
    assert [command[0] for command, _, _ in commands.asked[asked:]] == ["squeue"]  # expanded lists are kept
    blind, _ = slurm(squeue=(0, queue, ""), scontrol=(1, "", "error"))
    assert blind.jobs()["rest"].phase == "running"
    assert engine.cancel("rest", running=True) is None and "--state=RUNNING" in commands.asked[-1][0]


def test_slurm_gets_a_script_without_secrets(request_, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "canary")
    engine, commands = slurm(sbatch=(0, "12;lab\n", ""))
    engine.submit(request_)
    command, script, variables = commands.asked[-1]
    assert script == "#!/bin/sh\nmodule load cuda\nexec /venv/bin/python 'a b'\n"
    assert variables["SLURM_CONF"] == "/etc/lab.conf" and "canary" not in json.dumps(variables)
    for option in ("--job-name=run-1.1", "--export=NIL", "--no-requeue", "--signal=B:USR1@60", "--nodes=2",
                   "--gpus-per-node=1", "--constraint=ib&a100", "--account=rl"):  # fmt: skip
        assert option in command
    assert not any(option.startswith(("--partition", "--time", "--mem")) for option in command)


def test_slurm_gets_no_second_job_of_a_name(request_):
    engine, commands = slurm(squeue=(0, "9|RUNNING|2026-11-23T00:37:59|n1|n1|None|run-1.1\n", ""))
    engine.submit(request_)
    assert [command[0] for command, _, _ in commands.asked] == ["squeue"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (NO_PARTITION, "nowhere; Batch job submission failed: Invalid partition name"),
        (
            OVER_QUOTA,
            "rl has used up its quota of sockets; try again next month; .* Job violates accounting/QOS",
        ),
    ],
)
def test_slurm_refusal_is_told_in_its_words(request_, said, told):
    engine, _ = slurm(sbatch=(1, "", said))
    with pytest.raises(Refused, match=told):
        engine.submit(request_)


def test_slurm_that_takes_no_more_jobs_of_a_user_may_take_one_later(request_):
    said = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates\n"
    engine, _ = slurm(sbatch=(1, "", said))
    with pytest.raises(QueueFull, match="no more jobs of this user: .*QOSMaxSubmitJobPerUserLimit"):
        engine.submit(request_)


@pytest.mark.parametrize(
    "silence",
    [
        (1, "", NO_CONTROLLER),
        subprocess.TimeoutExpired("squeue", 20),
        FileNotFoundError(2, "No such file"),
        (1, "", ""),
    ],
)
def test_slurm_that_does_not_answer_is_unreachable(request_, silence):
    engine, _ = slurm(squeue=silence)
    with pytest.raises(Unreachable):
        engine.jobs()
    with pytest.raises(Refused, match="Nothing was started"):  # it was not asked to take the job
        engine.submit(request_)


def test_slurm_whose_answer_to_a_submission_is_lost_may_have_the_job(request_):
    for lost in ((1, "", NO_CONTROLLER), subprocess.TimeoutExpired("sbatch", 20)):
        with pytest.raises(Unreachable):
            slurm(sbatch=lost)[0].submit(request_)


def test_slurm_cancels_waiting_jobs_only():
    engine, commands = slurm()
    engine.cancel("run-1.1")
    assert {"--state=PENDING", "--name=run-1.1"} <= set(commands.asked[0][0])


def ray(tmp_path, **answers):
    """A Ray that answers by 'METHOD path'; keeps the requests."""
    asked, token = [], tmp_path / "token"
    token.write_text("canary-token\n")
    token.chmod(0o600)

    def answer(request):
        asked.append(request)
        found = answers.pop("first", None) if request.method == "POST" else None
        found = found or answers.get(f"{request.method} {request.url.path}".replace("run-1.1", "ID"))
        if isinstance(found, Exception):
            raise found
        status, body = found or (404, "Job run-1.1 does not exist")
        return httpx.Response(status, **({"text": body} if isinstance(body, str) else {"json": body}))

    cluster = Cluster(kind="ray", address="http://10.0.0.1:8265/", token_file=str(token))
    return RayEngine(cluster, httpx.MockTransport(answer)), asked


def test_ray_tells_jobs_by_name(tmp_path):
    engine, asked = ray(tmp_path, **{"GET /api/jobs/": (200, LISTED)})
    jobs = engine.jobs()
    assert set(jobs) == {"a.1", "b.1", "c.1"}
    assert (jobs["b.1"].phase, jobs["b.1"].told) == ("waiting", f"PENDING: {WAITS}")
    assert (jobs["c.1"].phase, jobs["c.1"].told) == ("running", "")
    assert jobs["a.1"].phase == "ended"
    assert asked[0].headers["Authorization"] == "Bearer canary-token"


def test_ray_gets_an_entrypoint_without_a_shell_above_the_keeper(tmp_path, request_):
    engine, asked = ray(tmp_path, **{"POST /api/jobs/": (200, {"job_id": "run-1.1", "submission_id": "run-1.1"})})
    engine.submit(request_)
    job = json.loads(asked[-1].content)
    assert " && exec /venv/bin/python 'a b' >> " in job["entrypoint"]
    assert job["runtime_env"] == {} and "canary" not in json.dumps(job)
    assert job["submission_id"] == "run-1.1" and set(job["entrypoint_resources"]) == {"ib", "a100"}


def test_ray_whose_node_has_just_started_is_asked_again(tmp_path, request_, monkeypatch):
    monkeypatch.setattr("toprope.supervisor.launchers.ray._RETRY_EVERY_S", 0.01)
    early = (500, "No available agent to submit job, please try again later.")
    engine, asked = ray(tmp_path, **{"first": early, "POST /api/jobs/": (200, {"job_id": "run-1.1"})})
    engine.submit(request_)
    assert [one.method for one in asked] == ["GET", "POST", "POST"]


def test_ray_gets_no_second_job_of_an_id(tmp_path, request_):
    engine, asked = ray(tmp_path, **{"GET /api/jobs/ID": (200, LISTED[2])})
    engine.submit(request_)
    assert [one.method for one in asked] == ["GET"]


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (400, "Traceback (most recent call last):\nTypeError: missing 1 argument\n", "400, TypeError: missing 1 arg"),
        (403, "rl exceeded its quota: requests.nvidia.com/gpu=4, used 8 of 8", "403, rl exceeded its quota: .* 8 of 8"),
    ],
)
def test_ray_refusal_is_told_in_its_words(tmp_path, request_, status, said, told):
    with pytest.raises(Refused, match=told):
        ray(tmp_path, **{"POST /api/jobs/": (status, said)})[0].submit(request_)


@pytest.mark.parametrize(
    "silence",
    [httpx.ReadTimeout("late"), httpx.ConnectError("no"), (401, ""), (403, ""), (502, ""), (302, ""), (200, "<html>")],
)
def test_ray_that_does_not_answer_is_unreachable(tmp_path, silence):
    with pytest.raises(Unreachable) as told:
        ray(tmp_path, **{"GET /api/jobs/": silence})[0].jobs()
    assert "canary" not in str(told.value)


def test_ray_that_does_not_answer_is_told_with_the_reason(tmp_path):
    for silence in (httpx.ConnectError("[Errno 111] Connection refused"), httpx.ReadTimeout("")):
        with pytest.raises(Unreachable, match=re.escape(str(silence)) or "ReadTimeout"):
            ray(tmp_path, **{"GET /api/jobs/": silence})[0].jobs()
    without = RayEngine(Cluster(kind="ray", address="http://r"), httpx.MockTransport(lambda _: httpx.Response(401)))
    with pytest.raises(Unreachable, match="asks for a token, the cluster's `token_file`"):
        without.jobs()


def test_ray_cancels_waiting_jobs_only(tmp_path):
    engine, asked = ray(tmp_path, **{"GET /api/jobs/": (200, LISTED)})
    for name in ("a.1", "b.1", "c.1", "d.1"):
        engine.cancel(name)
    assert [one.url.path for one in asked if one.method == "POST"] == ["/api/jobs/b.1/stop"]
    engine.cancel("c.1", running=True)
    assert asked[-1].url.path == "/api/jobs/c.1/stop"
