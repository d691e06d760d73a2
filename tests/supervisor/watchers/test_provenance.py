"""The manifest: inputs at the start, inputs after loading, and differences of later attempts."""

import hashlib
import itertools
import json
import subprocess
import time
from types import SimpleNamespace

import pytest

from tests.support.run_harness import RunHarness, ended, eventually
from toprope.records.messages import Checked, Ready
from toprope.records.run.folder import RunFolder
from toprope.records.run.manifest import Manifest
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.supervisor.watchers import provenance
from toprope.supervisor.watchers.provenance import ProvenanceWatcher, collect_manifest, hash_policy


def specification(tmp_path, **knobs):
    config = Config()
    config.algorithm.seed, config.environment.knobs = 7, knobs
    (tmp_path / "words.py").write_text("class Words: ...\n")
    return Specification(
        run_id="run-a", kind="train", created_at=time.time(), toprope_version="0", preset="cpu-embedded",
        environment=EnvironmentSource(name="words", file=str(tmp_path / "words.py"), attribute="Words"),
        config=config, locks={"budget.steps": {"max": 3, "reason": "r"}}, policy_cache=str(tmp_path),
        beside_preset={"algorithm.seed": [0, 7]},
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs", "run-a")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository in place of ours."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code.py").write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(root), *identity, *words], check=True)
    monkeypatch.setattr(provenance, "_ROOT", root)
    return root


def control_of(folder, run, attempt=1):
    events = []
    return SimpleNamespace(
        folder=folder, specification=run, status=lambda: SimpleNamespace(attempt=attempt), events=events,
        record_event=lambda kind, **data: events.append((kind, data)),
    )  # fmt: skip


def test_manifest_has_no_target_with_keys(folder, tmp_path):
    run = specification(tmp_path)
    run.environment = EnvironmentSource(name="orchestrator", adapter="orchestrator", target='{"API_KEY": "4711"}')
    assert collect_manifest(folder, run).environment.source == "orchestrator"


def test_manifest_names_commit_and_differences(folder, tmp_path, checkout):
    run = specification(tmp_path)
    clean = collect_manifest(folder, run).code
    assert len(clean.commit) == 40 and clean.changes_sha256 is None
    assert not (folder.path / "toprope.diff").exists()
    (checkout / "code.py").write_text("a = 2\n")
    changed = collect_manifest(folder, run).code
    assert changed.commit == clean.commit and changed.changes_sha256
    assert "+a = 2" in (folder.path / "toprope.diff").read_text()
    (checkout / "new.py").write_text("b = 1\n")
    later = collect_manifest(folder, run, 2).code
    assert later.changes_sha256 != changed.changes_sha256 and "new.py" in (folder.path / later.changes_file).read_text()
    kept = (folder.path / changed.changes_file).read_bytes()
    assert hashlib.sha256(kept).hexdigest() == changed.changes_sha256


def test_manifest_inputs_differ_by_name(folder, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    run = specification(tmp_path, path=str(data), other="/nowhere")
    first = collect_manifest(folder, run)
    assert (first.configuration.seed, first.configuration.beside_preset) == (7, {"algorithm.seed": [0, 7]})
    assert list(first.environment.files) == [str(data)]
    assert first.hardware.cores >= 1 and first.libraries["torch"] and first.python.startswith("CPython")
    assert collect_manifest(folder, run).inputs == first.inputs
    data.write_text("{}\n{}\n")
    (tmp_path / "words.py").write_text("class Words: pass\n")
    found = provenance.differing_inputs(first.inputs, collect_manifest(folder, run).inputs)
    assert set(found) == {"environment.sha256", f"environment.files.{data}"}


def test_manifest_lists_packages_of_own_interpreter(folder, tmp_path):
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    (site / "tiny_rules-1.5.dist-info").mkdir(parents=True)
    (site / "tiny_rules-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-rules\nVersion: 1.5\n"
    )
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    run = specification(tmp_path)
    assert collect_manifest(folder, run).environment.packages == {}
    there = run.environment.model_copy(update={"interpreter": str(tmp_path / "venv" / "bin" / "python")})
    recorded = collect_manifest(folder, run.model_copy(update={"environment": there}))
    assert recorded.environment.packages == {"tiny-rules": "1.5"}
    assert recorded.inputs["environment"]["packages"] == {"tiny-rules": "1.5"}


def test_hash_policy_uses_sizes_for_huge_policies(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    first = hash_policy("m", tmp_path)
    assert (first.hashed, first.bytes) == ("contents", 3)
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    assert hash_policy("m", tmp_path).sha256 != first.sha256
    monkeypatch.setattr(provenance, "_MOST_POLICY", 2)
    assert hash_policy("m", tmp_path).hashed == "names and sizes"


@pytest.mark.parametrize("when", ["listed", "measured"])
def test_file_that_vanishes_is_no_part_of_a_policy(when, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    before = hash_policy("m", tmp_path)
    temporary = tmp_path / ".status.json.5ar2"
    temporary.write_bytes(b"")

    def is_file(path):
        found = path in (temporary, tmp_path / "model.safetensors")
        temporary.unlink(missing_ok=True)
        return found

    def hashed(path):
        temporary.unlink(missing_ok=True)
        return original(path)

    original = provenance.sha256_of
    if when == "listed":
        monkeypatch.setattr(type(tmp_path), "is_file", is_file)
    else:
        monkeypatch.setattr(provenance, "sha256_of", hashed)
    assert hash_policy("m", tmp_path) == before


def test_policy_that_is_removed_meanwhile_has_no_hash(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    monkeypatch.setattr(provenance, "sha256_of", lambda path: path.unlink() or path.read_bytes().hex())
    with pytest.raises(FileNotFoundError):
        hash_policy("m", tmp_path)


NAMES = "abcdefg"
EXPLODING = "---\na: &a [x, y]\n"
for before, one in itertools.pairwise(NAMES):
    EXPLODING += f"{one}: &{one} [{', '.join([f'*{before}'] * 9)}]\n"
EXPLODING += f"license: *{NAMES[-1]}\nlicense_name: *{NAMES[-1]}\n---\n"
"""Each name has nine times the text of the one before."""


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\ntags: [a]\n---\n# Model\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: ours\n---\n", "other: ours"),
        ("---\r\nlicense: [mit, bsd]\r\n---\r\n", "mit, bsd"),
        ("---\nlicense: !!bool x\n---\n", "x"),
        ("---\nlicense: !!int ''\n---\n", ""),
        ("---\nlicense: null\n---\n", ""),
        (EXPLODING, ""),
        ("---\nlicense: other\nlicense_name: {a: [b]}\n---\n", "other"),
        ("---\nlicense: [mit, [bsd], {a: b}" + ", x" * 9 + "]\n---\n", "mit, x, x, x, x, x"),
        ("---\ntags: a\n---\n", ""),
        ("---\nlicense: [", ""),
        ("---\n{\n---\n", ""),
        ("text", ""),
    ],
)
def test_licence_is_read_from_the_models_card(tmp_path, card, licence):
    folder = tmp_path / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"abc")
    before = hash_policy("m", folder)
    (folder / "README.md").write_bytes(card.encode())
    found = hash_policy("m", folder)
    assert (before.licence, found.licence, found.sha256) == ("", licence, before.sha256), "weights and text are apart"
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "README.md").write_bytes(card.encode())
    assert hash_policy("m", tmp_path / "local").licence == licence


def test_manifest_is_complete_after_loading(folder, tmp_path):
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"abc")
    watcher = ProvenanceWatcher(control_of(folder, specification(tmp_path)))
    eventually(lambda: Manifest.read(folder))
    assert not Manifest.read(folder).complete
    watcher.on_report("policy", Ready(str(policy)))
    watcher.on_report("environment", Checked({"words": "1.2"}))
    watcher.on_end()
    watcher.on_end()  # may be called again
    done = eventually(lambda: (found := Manifest.read(folder)).complete and found)
    assert done.environment.versions == {"words": "1.2"} and done.policy.sha256
    assert "\n" in Manifest.path(folder).read_text().strip()  # for people


def test_later_attempt_records_differing_inputs(folder, tmp_path):
    run = specification(tmp_path)
    first = collect_manifest(folder, run)
    first.libraries["torch"] = "0.0.1"
    first.complete = True
    first.write(folder)
    policy = tmp_path / "policy"
    policy.mkdir()
    watcher = ProvenanceWatcher(control_of(folder, run, attempt=2))
    watcher.on_report("policy", Ready(str(policy)))
    watcher.on_report("environment", Checked({}))
    found = eventually(lambda: Manifest.read(folder).later_attempts)
    assert found["2"]["libraries.torch"][0] == "0.0.1"
    assert Manifest.read(folder).libraries["torch"] == "0.0.1"


def test_manifest_error_is_a_warning(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "collect_manifest", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    given = control_of(folder, specification(tmp_path))
    watcher = ProvenanceWatcher(given)

    def said():
        watcher.on_tick(0.0)
        return given.events

    assert eventually(said) == [("warning", {"what": "the manifest could not be written: OSError: no room"})]
    watcher.on_tick(1.0)
    assert len(given.events) == 1


def test_keeper_writes_manifest(tmp_path):
    harness = RunHarness(tmp_path)
    try:
        runs, folder = harness.start({"trainer": {"steps": 2, "at": "finished", "do": "sleep:0"}})
        eventually(lambda: Manifest.path(folder).exists())
        runs.stop(folder.run_id, 0.0)
        ended(runs, folder)
        assert json.loads(Manifest.path(folder).read_text())["run_id"] == folder.run_id
    finally:
        harness.close()
