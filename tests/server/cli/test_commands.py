"""The command line for people, over real processes: following runs, logs, deleting old ones."""

import errno
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from toprope_server.cli.runs.follow import LogTail
from toprope_server.cli.runs.prune import _delete, age_seconds, old_runs
from toprope_tools.workshop import Workshop

from tests.support.tools_house import become, step
from toprope.errors import InvalidValue
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.status import CrewMember, EventLog, Failure, Status
from toprope.records.run.usage import Spent, Usage, day_of
from toprope.settings.owner import Home
from toprope.settings.schema import Config
from toprope.supervisor.capacity.budget_ledger import deletion, read_accounts
from toprope.supervisor.lock import RunLock

COMMAND = [sys.executable, "-P", "-m", "toprope_server.cli"]
DAY = 86_400.0


def variables(home):
    kept = {name: os.environ[name] for name in ("PATH",)}
    places = {"HOME": str(home), "TOPROPE_HOME": str(home / "home"), "TOPROPE_CONFIG": str(home / "config")}
    return kept | places | {"COLUMNS": "100", "TERM": "xterm-256color"}


def toprope(home, *arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=variables(home))


def make_run(home, run_id, state="queued", *, ended=0.0, created=0.0, **fields):
    """A run in a state, which ended so many seconds ago if it ended."""
    folder = RunFolder.create(home / "home" / "runs", run_id)
    now = time.time()
    times = {"created_at": now - (created or ended), "since": now, "updated_at": now}
    over = {"ended_at": now - ended} if state in ("completed", "stopped", "failed", "lost") else {}
    Status(run_id=run_id, kind="train", environment="words", state=state, **times, **over, **fields).write(folder)
    specify(folder, Config())
    return folder


def specify(folder, config, created_at=0.0, opponent_policy=None):
    Specification(
        run_id=folder.run_id,
        kind="train",
        created_at=created_at,
        toprope_version="0",
        environment=EnvironmentSource(name="words", file="x", attribute="X"),
        config=config,
        policy_cache="",
        opponent_policy=opponent_policy,
    ).write(folder)


@pytest.fixture
def live(tmp_path):
    """A live run: the test holds its lock as its keeper would."""
    folder = make_run(tmp_path, "a-run")
    lock = RunLock.acquire(folder.lock)
    yield tmp_path, folder
    lock.release()


def read_until(stream, text, limit=30.0):
    """Read a stream until `text` has come."""
    found, deadline = "", time.monotonic() + limit
    while text not in found:
        assert time.monotonic() < deadline, found
        if select.select([stream], [], [], 0.2)[0]:
            chunk = os.read(stream if isinstance(stream, int) else stream.fileno(), 65_536).decode(errors="replace")
            assert chunk, found
            found += chunk
    return found


def finish(folder, state="completed", **fields):
    become(folder, state, ended_at=time.time(), **fields)
    EventLog(folder).append("end", state=state)


def test_watch_in_pipe_prints_changes_until_run_ends(live):
    home, folder = live
    watching = subprocess.Popen(
        [*COMMAND, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables(home)
    )
    try:
        seen = read_until(watching.stdout, "queued")
        step(folder, 3, total=20, rollouts_per_second=1450.0)
        seen += read_until(watching.stdout, "step 3/20")
        finish(folder, evaluations={"before": {"accuracy": 0.1}, "after": {"accuracy": 0.9}})
        seen += watching.stdout.read().decode()
        assert watching.wait(timeout=10) == 0
        assert watching.stderr.read() == b""
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()
        watching.stderr.close()
    for part in (
        "queued -> training",
        "1450 rollouts/s",
        "training -> completed",
        "held-out accuracy (sampled) 10.0% -> 90.0%",
    ):
        assert part in seen
    assert "\x1b" not in seen
    assert re.match(r"\d\d:\d\d:\d\d a-run: ", seen)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_watch_follows_a_lost_run_that_resumes_by_itself(live, when):
    home, folder = live
    if when == "before":
        finish(folder, "lost", resume_at=time.time() + 60)
    watching = subprocess.Popen([*COMMAND, "watch"], stdout=subprocess.PIPE, env=variables(home))
    try:
        if when == "meanwhile":
            read_until(watching.stdout, "queued")
            finish(folder, "lost", resume_at=time.time() + 60)
        read_until(watching.stdout, "lost")
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(timeout=1)
        become(folder, "training", ended_at=None, resume_at=None)
        finish(folder)
        assert watching.wait(timeout=20) == 0
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_watch_draws_bar_crew_and_events_in_terminal(live):
    home, folder = live
    step(folder, 5, total=20, success=0.25)
    become(folder, "training", crew={"trainer": CrewMember(state="ready", since=time.time())})
    outer, inner = pty.openpty()
    watching = subprocess.Popen([*COMMAND, "watch", "a-run"], stdout=inner, stderr=inner, env=variables(home))
    os.close(inner)
    try:
        seen = read_until(outer, "step 5/20")  # the bar goes on by itself
        finish(folder, "failed", failure=Failure(component="trainer", reason="out of memory", hint="Lower it."))
        seen += read_until(outer, "Lower it.")
        assert watching.wait(timeout=10) == 1
    finally:
        watching.kill()
        watching.wait()
        os.close(outer)
    for part in ("a-run", "training", "step 5/20", "reward 0.25", "success 25.0%", "trainer", "ready", "ETA", "failed"):
        assert part in seen, part
    assert "━" in seen


def test_watch_ends_on_ctrl_c_and_reports_no_live_run(live):
    home, folder = live
    watching = subprocess.Popen(
        [*COMMAND, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables(home)
    )
    try:
        read_until(watching.stdout, "queued")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=5) == 130
        assert b"Traceback" not in watching.stderr.read()
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()
        watching.stderr.close()
    finish(folder)
    assert "No run is live" in toprope(home, "watch").stdout
    wrong = toprope(home, "watch", "b-run")
    assert wrong.returncode == 1
    assert "no run 'b-run'" in wrong.stderr


def test_logs_follow_rotation_until_run_ends(live):
    home, folder = live
    folder.log("trainer").write_text("one\n")
    following = subprocess.Popen(
        [*COMMAND, "logs", "a-run", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables(home)
    )
    try:
        seen = read_until(following.stdout, "one")
        with folder.log("trainer").open("a") as log:
            log.write("two\n\x1b[31mred\x1b[0m\n")
        seen += read_until(following.stdout, "red")
        os.rename(folder.log("trainer"), folder.logs / "trainer.log.1")
        folder.log("trainer").write_text("after the rotation\n")
        folder.log("keeper").write_text("kept\n")
        seen += read_until(following.stdout, "kept")
        with folder.log("trainer").open("a") as log:
            log.write("no end of line")
        finish(folder)
        seen += following.stdout.read().decode()
        assert following.wait(timeout=10) == 0
    finally:
        following.kill()
        following.wait()
        following.stdout.close()
        following.stderr.close()
    assert sorted(line.split("|")[1].strip() for line in seen.splitlines()) == sorted(
        ["one", "two", "red", "after the rotation", "kept", "no end of line"]
    )
    assert "\x1b" not in seen
    assert "trainer     | one" in seen
    wrong = toprope(home, "logs", "a-run", "trainr", "-f")
    assert (wrong.returncode, "Components: keeper" in wrong.stderr) == (1, True)


def test_tail_keeps_partial_lines_until_complete(tmp_path):
    path = tmp_path / "x.log"
    tail = LogTail(path)
    assert tail.lines() == []
    path.write_text("who")
    assert tail.lines() == []
    with path.open("a") as log:
        log.write("le\nrest")
    assert tail.lines() == ["whole"]
    assert tail.lines(last=True) == ["rest"]
    tail.close()


def test_prune_deletes_only_old_ended_runs_after_dry_run(tmp_path):
    old = make_run(tmp_path, "old", "completed", ended=40 * DAY)
    (old.checkpoints / "weights").write_bytes(os.urandom(200_000))
    make_run(tmp_path, "middle", "failed", ended=10 * DAY)
    make_run(tmp_path, "new", "completed", ended=60.0)
    living = make_run(tmp_path, "live", "training", created=90 * DAY)
    lock = RunLock.acquire(living.lock)
    # Its status says that it ended, and still somebody works on it.
    used = make_run(tmp_path, "used", "stopped", ended=50 * DAY)
    other = RunLock.acquire(used.lock)
    try:
        shown = toprope(tmp_path, "prune")
        assert shown.returncode == 0
        assert "old: completed 40 d 0 h ago, train words" in shown.stdout
        assert re.search(r"\n1 run, 2\d\d\.\d kB would be deleted. Nothing was deleted: add --yes.", shown.stdout)
        assert old.path.is_dir()
        assert "nothing to delete" in toprope(tmp_path, "prune", "--keep", "3", "--older-than", "5d").stdout
        fewer = toprope(tmp_path, "prune", "--keep", "2").stdout
        assert ("old: " in fewer, "middle: " in fewer) == (True, False)
        done = toprope(tmp_path, "prune", "--older-than", "5d", "--yes")
        assert done.returncode == 0, done.stderr
        assert "Deleted: 2 runs" in done.stdout
        assert sorted(path.name for path in (tmp_path / "home" / "runs").iterdir()) == ["live", "new", "used"]
        assert "nothing to delete" in toprope(tmp_path, "prune", "--older-than", "5d").stdout
    finally:
        lock.release()
        other.release()


def test_prune_leaves_folders_that_are_no_readable_runs(tmp_path):
    runs = make_run(tmp_path, "old", "completed", ended=40 * DAY).path.parent
    shutil.copytree(runs / "old", runs / "archive" / "old")
    shutil.copytree(runs / "old", runs / "copy")
    for name, file, text in (
        ("newer", "status.json", '{"version": 999}'),
        ("unknown", "spec.json", '{"version": 999}'),
    ):
        make_run(tmp_path, name, "completed", ended=40 * DAY)
        (runs / name / file).write_text(text)
    for path in runs.iterdir():
        os.utime(path, (time.time() - 40 * DAY,) * 2)
    shown = toprope(tmp_path, "prune")
    assert "1 run, " in shown.stdout and "old: completed" in shown.stdout
    assert toprope(tmp_path, "prune", "--yes").returncode == 0
    left = {"archive", "copy", "newer", "unknown"}
    assert {path.name for path in runs.iterdir() if not path.name.startswith(".")} == left
    # Those are none of the newest runs either.
    make_run(tmp_path, "new", "completed", ended=60.0)
    kept = toprope(tmp_path, "prune", "--keep", "1").stdout
    assert "nothing to delete" in kept and all(f"{name}: left as it is" in kept for name in left)


def test_prune_looks_again_before_it_deletes(tmp_path):
    folder = make_run(tmp_path, "old", "completed", ended=40 * DAY)
    shop = Workshop.open(Home(tmp_path / "home", tmp_path / "config"))
    [leftover], _ = old_runs(shop, older_than_s=0.0, keep=None)
    become(folder, "lost", ended_at=None)
    assert "says lost" in _delete(shop, leftover) and folder.spec.is_file()


@pytest.mark.parametrize("plays", ["policy", "opponent"])
def test_prune_keeps_checkpoint_used_by_live_run(tmp_path, plays):
    old = make_run(tmp_path, "old", "completed", ended=40 * DAY)
    living = make_run(tmp_path, "live", "training")
    config, weights = Config(), str(old.checkpoints / "step-1")
    if plays == "policy":
        config.policy.model = weights
    specify(living, config, opponent_policy=weights if plays == "opponent" else None)
    lock = RunLock.acquire(living.lock)
    try:
        assert "nothing to delete" in toprope(tmp_path, "prune").stdout
    finally:
        lock.release()


def test_prune_keeps_members_of_live_and_kept_sweeps(tmp_path):
    sweep, other = "letters-251122-2036-ab12", "letters-251101-2036-cd34"
    for run_id in (f"{sweep}-m01", f"{other}-m01", f"{other}-final", "old"):
        make_run(tmp_path, run_id, "completed", ended=40 * DAY)
    make_run(tmp_path, other, "completed", ended=60.0)
    living = make_run(tmp_path, sweep, "training", created=90 * DAY)
    lock = RunLock.acquire(living.lock)
    try:
        shown = toprope(tmp_path, "prune").stdout
        assert "old: " in shown and f"{other}-m01: " in shown and f"{sweep}-m01: " not in shown
        kept = toprope(tmp_path, "prune", "--keep", "1", "--older-than", "30d").stdout
        assert "old: " in kept and f"{other}-m01: " not in kept and f"{other}-final: " not in kept
    finally:
        lock.release()


def test_prune_leaves_what_a_run_counts_towards_today(tmp_path):
    run = make_run(tmp_path, "spell-261130-0725-b8cr", "completed", ended=60.0)
    specify(run, Config(), created_at=time.time())
    Usage(usd=3.0, days={day_of(time.time()): Spent(usd=3.0, cpu_s=3600.0)}).write(run)
    runs = tmp_path / "home" / "runs"
    before = read_accounts(runs)
    assert toprope(tmp_path, "prune", "--keep", "0", "--yes").returncode == 0
    [account] = read_accounts(runs)
    assert (account.started_today, account.is_run, account.live) == (True, True, False)
    assert account.used_today == before[0].used_today == {"cost_usd": 3.0, "cpu_hours": 1.0, "gpu_hours": 0.0}
    assert not run.path.exists() and read_accounts(runs, time.time() - 9 * DAY) == []
    assert read_accounts(runs, time.time() + DAY) == read_accounts(runs) == []


def test_deletion_on_a_full_disk_leaves_what_a_run_counts_towards_today(tmp_path, monkeypatch):
    run = make_run(tmp_path, "spell-261130-0725-b8cr", "completed", ended=60.0)
    specify(run, Config(), created_at=time.time())

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as filled:
        filled.setattr(tempfile, "mkstemp", full)
        with deletion(run):
            shutil.rmtree(run.path)
            filled.undo()
    assert [account.started_today for account in read_accounts(run.path.parent)] == [True]


def test_prune_knows_exports(tmp_path):
    make_run(tmp_path, "new", "completed", ended=60.0)
    exports = tmp_path / "home" / "exports"
    old, new, own = "old-0a1b2c3d.jsonl", "new-0a1b2c3d.jsonl", {"notes.txt", "notes-20240131.csv"}
    for name, age in ((old, 40), (new, 1), (".jobs", 40), ("run-tensorboard", 40), *((name, 40) for name in own)):
        exports.mkdir(exist_ok=True)
        (exports / name).write_text("{}") if "." in name[1:] else (exports / name).mkdir()
        os.utime(exports / name, (time.time() - age * DAY,) * 2)
    assert f"{old}: an export, made 40 d" in toprope(tmp_path, "prune").stdout
    assert toprope(tmp_path, "prune", "--older-than", "30d", "--yes").returncode == 0
    assert {path.name for path in exports.iterdir()} == {".jobs", new, *own}


def test_prune_finishes_interrupted_prune_and_removes_leftovers(tmp_path):
    make_run(tmp_path, "new", "completed", ended=60.0)
    home = tmp_path / "home"
    (home / "runs" / ".pruned-gone").mkdir()
    policies = home / "policies"
    from toprope.training.policy.loading import embedded_folder

    for name in (".making-abc", f"embedded-{0:016}", "embedded-notes", embedded_folder(policies).name):
        (policies / name).mkdir(parents=True)
    (home / ".index.xyz").write_text("")
    fresh = policies / ".making-now"
    fresh.mkdir()
    for path in (policies / ".making-abc", home / ".index.xyz"):
        os.utime(path, (time.time() - 2 * DAY, time.time() - 2 * DAY))
    done = toprope(tmp_path, "prune", "--yes")
    assert "4 leftovers" in done.stdout, done.stdout + done.stderr
    assert sorted(path.name for path in policies.iterdir()) == sorted(
        [".making-now", "embedded-notes", embedded_folder(policies).name]
    )
    assert sorted(path.name for path in home.iterdir() if not path.name.startswith("audit.")) == ["policies", "runs"]
    assert [path.name for path in (home / "runs").iterdir()] == ["new"]


def test_ages_are_parsed():
    assert age_seconds("12h") == 43_200
    assert age_seconds(" 1.5d ") == 1.5 * DAY
    for wrong in ("", "30", "d", "30 years", "-1d"):
        with pytest.raises(InvalidValue, match="12h, 30d, 8w"):
            age_seconds(wrong)


def test_prune_refuses_contradictory_options(tmp_path):
    assert toprope(tmp_path, "prune", "--yes", "--dry-run").returncode == 2
    wrong = toprope(tmp_path, "prune", "--older-than", "soon")
    assert (wrong.returncode, "12h, 30d, 8w" in wrong.stderr) == (1, True)


def test_resume_and_stop_of_run_without_reason(tmp_path):
    specify(make_run(tmp_path, "a-run", "completed", ended=60.0), Config())
    resumed = toprope(tmp_path, "resume", "a-run")
    assert resumed.returncode == 1
    assert "completed" in resumed.stderr
    assert "Traceback" not in resumed.stderr
    stopped = toprope(tmp_path, "stop", "a-run")
    assert (stopped.returncode, "completed already" in stopped.stdout) == (0, True)
    assert toprope(tmp_path, "resume", "b-run").stderr.startswith("toprope: There is no run 'b-run'.")


def test_every_command_explains_itself(tmp_path):
    shown = toprope(tmp_path, "--help").stdout
    for name in ("serve", "token", "runs", "status", "watch", "logs", "stop", "resume", "doctor", "prune", "install"):
        assert re.search(rf"\b{name}\b +\w", shown), name
    assert list(tmp_path.iterdir()) == []
