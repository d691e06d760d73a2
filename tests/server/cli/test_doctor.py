"""Findings of the doctor: on a sound machine nothing broken, and each illness with its place and its remedy."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from toprope_server.cli.doctor import checks, doctor
from toprope_server.cli.doctor.checks import Finding, every
from toprope_server.cli.doctor.owners_files import owners_files
from toprope_server.http.token import TokenFile

from toprope.errors import EnvironmentFailed
from toprope.records.index.database import Index
from toprope.records.run.folder import RunFolder
from toprope.settings.owner import Home
from toprope.workbench import entries
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.catalog.describe import BROKEN, require_usable
from toprope.workbench.catalog.opened import Opened
from toprope.workbench.interpreters.engines import engines_of
from toprope.workbench.interpreters.registry import Added

COMMAND = [sys.executable, "-P", "-m", "toprope_server.cli", "doctor"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for name in checks._KEYS:
        monkeypatch.delenv(name, raising=False)
    made = Home(tmp_path / "home", tmp_path / "config")
    made.ensure()
    made.configuration.mkdir()
    return made


def found(home, check):
    return list(every(home, [check]))


def broken(findings):
    return [finding for finding in findings if finding.level == "broken"]


def test_doctor_reports_healthy_machine(tmp_path):
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "COLUMNS": "120"}
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=100, env=environment)
    report = json.loads(done.stdout)
    assert (done.returncode, report["broken"]) == (0, 0), done.stdout
    subjects = {finding["subject"] for finding in report["findings"]}
    assert subjects >= {
        "Python", "packages", "torch", "GPU", "home", "disk", "owner's files", "environments", "engines", "index",
        "runs", "containment", "sandbox", "WANDB_API_KEY", "HF_TOKEN", "OPENROUTER_API_KEY", "TINKER_API_KEY",
        "claude-desktop", "claude-code", "inspector", "limits of environments",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count, told", [(0, "0 warnings"), (1, "1 warning"), (2, "2 warnings")])
def test_doctor_counts_its_warnings(home, monkeypatch, capsys, count, told):
    monkeypatch.setattr(doctor, "_ALL", [lambda _: iter([Finding("disk", "warning", "small", "")] * count)])
    assert doctor.main(False) == 0
    assert f"0 broken, {told}. Settings" in capsys.readouterr().out


def test_doctor_exits_one_with_line_and_remedy(tmp_path):
    config = tmp_path / "config"
    config.mkdir()
    (config / "locks.yaml").write_text(
        "# mine\nlocks:\n  - field: optimizer.lerning_rate\n    value: 1\n    reason: x\n"
    )
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "COLUMNS": "150", "TOPROPE_CONFIG": str(config)}
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout
    assert "line 3" in done.stdout
    assert "1 broken" in done.stdout


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("settings.yaml", "preset: x\nstatus:\n  min_s: soon\n", 3),
        ("settings.yaml", "preset: x\n\nvariabels: {}\n", 3),
        ("settings.yaml", "preset: [\n", 2),
        ("settings.yaml", "# a\nhttp:\n  port: 70000\n", 3),
        ("settings.yaml", "status: {}\nmachine:\n  gpus: []\n  thread: 4\n", 4),
        ("locks.yaml", "locks:\n - {field: budget.steps, max: 5, reason: a}\n - {field: budget.steps, max: 6}\n", 3),
        ("locks.yaml", "locks:\n - field: budget.steps\n   maximum: 5\n", 3),
        ("clusters.yaml", "lab:\n  kind: slurm\n  pithon: python3\n", 3),
        ("presets/mine.yaml", "description: x\nconfig:\n  rollout:\n    grup_size: 4\n", 4),
    ],
)  # fmt: skip
def test_doctor_names_line_of_mistake_in_owners_files(home, name, text, line):
    path = home.configuration / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (finding,) = broken(found(home, owners_files))
    assert finding.text.startswith(f"line {line}: ") or f"at line {line}" in finding.text, finding
    assert str(path) in finding.text


def test_doctor_reports_missing_folders_in_settings(home):
    home.settings_file.write_text("preset: hermess\nenvironments: [mine]\n")
    findings = {finding.level: finding for finding in found(home, owners_files)}
    assert "no preset 'hermess'" in findings["broken"].text
    assert "cpu-embedded" in findings["broken"].remedy
    assert str(home.configuration / "mine") in findings["warning"].text


def test_doctor_doubts_settings_that_cannot_be_meant(home):
    home.settings_file.write_text(
        "trainers: [nowhere]\nhttp: {certificate: nofile.pem}\nnotify: {command: [nosuchprogram, x]}\n"
        "status: {min_s: 100, max_s: 10}\nenvironment: {sort_leters: {reads: [elsewhere]}}\n"
    )
    doubts = [finding.text for finding in found(home, owners_files) if finding.level == "warning"]
    assert doubts == [
        f"trainers: there is no folder {home.configuration / 'nowhere'}",
        "http.certificate and http.key belong together",
        f"http.certificate: there is no file {home.configuration / 'nofile.pem'}",
        "notify.command: there is no program 'nosuchprogram'",
        f"environment: sort_leters may use {home.configuration / 'elsewhere'}, which does not exist",
        "status: max_s 10 is less than min_s 100, which counts",
    ]
    (unknown,) = [finding for finding in found(home, checks.environments) if finding.level == "warning"]
    assert "no environment 'sort_leters'" in unknown.text and unknown.remedy == "Did you mean sort_letters?"
    home.settings_file.write_text(
        "trainers: [.]\nhttp: {certificate: settings.yaml, key: settings.yaml}\n"
        f"notify: {{command: [{sys.executable}]}}\n"
        "status: {min_s: 10, max_s: 10}\nenvironment: {sort_letters: {reads: [.]}, standard-tasks: {trust: yes}}\n"
    )
    assert not [one for check in (owners_files, checks.environments) for one in found(home, check) if one.remedy]


def test_doctor_tells_if_the_owners_locks_do_not_hold(home, monkeypatch):
    monkeypatch.setenv("TOPROPE_CONFIG", str(home.configuration))
    assert [finding.level for finding in found(home, owners_files)] == ["ok"]
    (home.configuration / "locks.yaml").write_text("")
    assert "no field is locked" in found(home, owners_files)[-1].text
    gone = Home(home.path, home.configuration / "confg")
    monkeypatch.setenv("TOPROPE_CONFIG", str(gone.configuration))
    (finding,) = found(gone, owners_files)
    assert finding.level == "warning" and f"names {gone.configuration}, which does not exist" in finding.text


def test_doctor_names_keys_without_values(home, monkeypatch):
    home.settings_file.write_text("variables: {tracker: {WANDB_API_KEY: w-secret}, api: {HF_TOKEN: h-secret}}\n")
    monkeypatch.setenv("OPENROUTER_API_KEY", "o-secret")
    findings = {finding.subject: finding for finding in found(home, checks.keys)}
    assert findings["WANDB_API_KEY"].level == "ok"
    assert findings["HF_TOKEN"].level == "warning"
    assert "policy needs it" in findings["HF_TOKEN"].text
    assert "--variable OPENROUTER_API_KEY" in findings["OPENROUTER_API_KEY"].remedy
    assert "missing" in findings["TINKER_API_KEY"].text
    assert "secret" not in repr(findings)


@pytest.mark.parametrize(
    ("component", "rest"),
    [
        ("policy", "; gated data sets need it below variables, environment"),
        ("'*'", "; gated data sets need it below variables, environment"),
        ("environment", "; gated models need it below variables, policy"),
    ],
)
def test_doctor_tells_what_a_hub_key_does_not_reach(home, component, rest):
    home.settings_file.write_text(f"variables: {{{component}: {{HF_TOKEN: h-secret}}}}\n")
    (finding,) = [finding for finding in found(home, checks.keys) if finding.subject == "HF_TOKEN"]
    assert finding.level == "ok" and finding.text.endswith(rest) and "secret" not in repr(finding)
    home.settings_file.write_text("variables: {policy: {HF_TOKEN: x}, environment: {HF_TOKEN: x}}\n")
    (finding,) = [finding for finding in found(home, checks.keys) if finding.subject == "HF_TOKEN"]
    assert finding.text == "in settings.yaml, for policy, environment"


def test_doctor_reports_files_readable_by_others(home):
    home.settings_file.write_text("variables: {policy: {HF_TOKEN: x}}\n")
    os.chmod(home.settings_file, 0o644)
    token = TokenFile(home.configuration)
    token.ensure()
    assert not broken(found(home, owners_files))
    os.chmod(token.path, 0o644)
    findings = {finding.subject: finding for finding in found(home, owners_files)}
    assert (findings["settings.yaml"].level, findings["http-token"].level) == ("warning", "broken")
    assert f"chmod 600 {token.path}" in findings["http-token"].remedy


def test_doctor_reports_damaged_index_and_keeps_it(home):
    assert [finding.level for finding in found(home, checks.index)] == ["note"]
    Index(home.index).create_draft("p", {}, [], {})
    assert found(home, checks.index)[0].text == "intact"
    home.index.write_bytes(b"nothing of the kind" * 100)
    (finding,) = broken(found(home, checks.index))
    assert "doctor --repair" in finding.remedy
    assert home.index.read_bytes().startswith(b"nothing")


def test_doctor_reports_broken_environments_with_cause(home):
    folder = home.configuration / "environments"
    folder.mkdir()
    (folder / "mine.py").write_text("from toprope.sdk import Environment\nclass Mine(Environment:\n")
    (finding,) = broken(found(home, checks.environments))
    assert "mine" in finding.text
    assert "mine.py:2" in finding.text and finding.remedy == "Fix its file."


def test_doctor_counts_only_what_was_opened_as_ready(home):
    folder = home.configuration / "environments"
    folder.mkdir()
    (folder / "mine.py").write_text("from toprope.sdk import Environment\nclass Mine(Environment): ...\n")
    [finding] = [one for one in found(home, checks.environments) if " are ready" in one.text]
    before = int(finding.text.split()[0])
    assert finding.text.endswith(" are ready, 2 not tried") and finding.level == "ok"
    Opened(home.path).add(Catalog([folder]).find("mine"))
    [finding] = [one for one in found(home, checks.environments) if " are ready" in one.text]
    assert finding.text.startswith(f"{before + 1} of ") and finding.text.endswith(", 1 not tried")


def test_doctor_asks_nobody_to_fix_code_of_others(home, monkeypatch):
    theirs = [entries.broken("trl", "Its adapter cannot be used: no", "installed", ecosystem="trl")]
    monkeypatch.setattr(Catalog, "entries", lambda self: theirs)
    [finding] = [one for one in broken(found(home, checks.environments)) if one.text.startswith("trl: ")]
    assert finding.remedy == BROKEN
    with pytest.raises(EnvironmentFailed) as refused:
        require_usable(theirs[0])
    assert refused.value.hint == BROKEN


def test_doctor_reports_an_engine_whose_interpreter_is_gone(home, tmp_path):
    assert [finding.level for finding in found(home, checks.engines)] == ["note"]
    (python := tmp_path / "bin" / "python").parent.mkdir()
    python.touch(0o700)
    with engines_of(home).changing() as entries:
        entries["vllm"] = Added(name="vllm", kind="engine", given="vllm", python=str(python))
    assert [finding.level for finding in found(home, checks.engines)] == ["ok"]
    python.unlink()
    (finding,) = broken(found(home, checks.engines))
    assert "lost its interpreter" in finding.text


def test_doctor_reports_unreadable_and_stuck_runs(home):
    folder = RunFolder.create(home.runs, "odd")
    folder.status.write_text("{}")
    status = {"run_id": "left", "kind": "train", "environment": "e", "state": "training"}
    other = RunFolder.create(home.runs, "left")
    other.status.write_text(json.dumps(status | {"created_at": 1.0, "since": 1.0, "updated_at": 1.0}))
    findings = found(home, doctor.runs)
    assert [finding.level for finding in findings] == ["warning", "broken", "ok"]
    assert "toprope status left" in findings[0].remedy


def test_doctor_reports_missing_and_wrong_packages(home, monkeypatch):
    real = checks.metadata.version
    versions = {"rich": "1.0", "typer": None, "anyio": "4.9.1"}

    def version(name):
        if name in versions:
            if versions[name] is None:
                raise checks.metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    monkeypatch.setattr(checks.metadata, "version", version)
    wrong, other = found(home, checks.packages)
    assert wrong.level == "broken"
    assert "rich 1.0 is not >=13" in wrong.text
    assert "typer is missing" in wrong.text
    assert "anyio 4.9.1 (tested: " in other.text


def test_doctor_reports_torch_that_does_not_load(home, monkeypatch):
    monkeypatch.setattr(checks, "_TORCH", "import no_such_torch")
    (finding,) = found(home, checks.torch)
    assert (finding.level, "no_such_torch" in finding.text) == ("broken", True)


def test_doctor_reports_unwritable_home_and_full_disk(home, monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(total=10, used=9, free=1))
    (finding,) = broken(found(home, checks.folders))
    assert (finding.subject, "prune" in finding.remedy) == ("disk", True)
    blocked = home.path / "file"
    blocked.write_text("")
    other = Home(blocked / "home", home.configuration)
    assert "home" in {finding.subject for finding in broken(found(other, checks.folders))}


def test_doctor_reports_which_clients_know_installation(home):
    path = doctor.configuration_file("claude-code")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"mcpServers": {}}))
    assert {f.subject: f.remedy for f in found(home, doctor.clients)}["claude-code"] == "toprope install claude-code"
    command, *arguments = doctor.server_command()
    path.write_text(json.dumps({"mcpServers": {"toprope": {"command": command, "args": arguments}}}))
    assert {f.subject: f.level for f in found(home, doctor.clients)}["claude-code"] == "ok"
    path.write_text(json.dumps({"mcpServers": {"toprope": {"command": "/gone/python", "args": []}}}))
    assert {f.subject: f.level for f in found(home, doctor.clients)}["claude-code"] == "warning"


def test_invalid_settings_are_one_broken_row(home):
    home.settings_file.write_text("machine: {thread: 4}\nvariables: {policy: {HF_TOKEN: h-secret}}\n")
    (cause,) = found(home, owners_files)[:1]
    assert cause.level == "broken" and cause.remedy == "Did you mean threads?"
    assert cause.text == f"line 1: {home.settings_file}: machine.thread: there is no such key."
    for check in (checks.environments, checks.keys, doctor.walls, doctor.containment):
        (finding,) = found(home, check)
        assert (finding.level, finding.text) == ("note", "not checked: settings.yaml is invalid")


def test_failing_check_is_a_finding(home):
    def fails(_):
        yield Finding("a", "ok", "b")
        raise RuntimeError("inside")

    assert [finding.level for finding in found(home, fails)] == ["ok", "broken"]


def test_doctor_reports_containment_level(home, monkeypatch):
    from toprope.supervisor.keeper import containment

    monkeypatch.setattr(containment, "probe_bubblewrap", lambda: "")
    held = found(home, doctor.containment)[0]
    assert held.level == "ok" and held.text.startswith("bubblewrap") and "can escape" in held.text.lower()
    monkeypatch.setattr(containment, "probe_bubblewrap", lambda: "bwrap is not installed")
    held = found(home, doctor.containment)[0]
    assert held.level in ("note", "warning") and "bwrap is not installed" in held.text
    home.settings_file.write_text("containment: bubblewrap\n")
    (finding,) = broken(found(home, doctor.containment))
    assert "containment: auto" in finding.remedy
    home.settings_file.write_text("containment: guard\n")
    assert "owner's settings" in found(home, doctor.containment)[0].text


def test_doctor_reports_wall_and_exceptions(home, monkeypatch):
    home.settings_file.write_text("environment: {old: {trust: yes}, new: {reads: [x]}}\n")
    (stands,) = found(home, doctor.walls)
    assert "Trusted, without a wall: old." in stands.text and "new" not in stands.text
    monkeypatch.setattr("toprope.sdk.wall.level_here", lambda: ("none", "darwin has neither Landlock nor seccomp"))
    (missing,) = found(home, doctor.walls)
    assert missing.level == "warning" and "they can read and change what you can" in missing.text and missing.remedy
    home.settings_file.write_text("wall: {missing: refuse}\n")
    (refused,) = found(home, doctor.walls)
    assert refused.level == "note" and "no environment starts" in refused.text
