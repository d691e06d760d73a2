"""The owner's clusters: clusters.yaml, what would be asked for, and `toprope doctor --cluster`."""

from __future__ import annotations

import sys

import pytest
import yaml
from toprope_server.cli.doctor import cluster
from toprope_server.cli.doctor.cluster import _judge, check_cluster

from toprope.errors import InvalidValue
from toprope.settings.clusters import Clusters
from toprope.settings.owner import Home
from toprope.settings.sections.launcher import LauncherSection
from toprope.supervisor.launchers import probe
from toprope.workbench.launch.requirements import describe_job

LAB = {"kind": "slurm", "python": sys.executable, "partition": "gpu"}
MIRROR = {"host": "login", "home": "/scratch/toprope", "key_file": "~/key"}
FARM = {"kind": "ray", "address": "http://10.0.0.1:8265"}


def owners(tmp_path, **named) -> Home:
    home = Home(tmp_path / "home", tmp_path / "config")
    home.configuration.mkdir(parents=True)
    (home.configuration / "clusters.yaml").write_text(yaml.safe_dump(named))
    return home


@pytest.mark.parametrize(
    ("launcher", "named", "found"),
    [
        ({"kind": "slurm"}, {"lab": LAB, "farm": FARM}, "lab"),
        ({"kind": "ray"}, {"lab": LAB, "farm": FARM}, "farm"),
        ({"kind": "slurm", "cluster": "old"}, {"lab": LAB, "old": LAB}, "old"),
        ({"kind": "slurm"}, {"lab": LAB, "old": LAB}, "must name one of .* lab, old"),
        ({"kind": "slurm", "cluster": "labb"}, {"lab": LAB}, "Did you mean lab"),
        ({"kind": "slurm", "cluster": "farm"}, {"farm": FARM}, "no slurm cluster 'farm'"),
        ({"kind": "ray"}, {}, "has no ray cluster"),
    ],
)
def test_cluster_of_a_run_is_the_named_or_the_only_one(tmp_path, launcher, named, found):
    clusters = owners(tmp_path, **named).clusters()
    section = LauncherSection.model_validate(launcher)
    if found in named:
        assert clusters.chosen(section)[0] == found
        return
    with pytest.raises(InvalidValue, match=found):
        clusters.chosen(section)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kind": "pbs"}, "lab: kind"),
        ({"kind": "ray"}, "needs the address"),
        ({**FARM, "address": "http://me:secret@10.0.0.1"}, "without user and password"),
        ({**FARM, "setup": ["module load x"]}, "are for Slurm"),
        ({**FARM, "partition": "x"}, "are for Slurm"),
        ({**LAB, "address": "http://10.0.0.1"}, "lab: address and token_file are for Ray"),
        ({**LAB, "setup": "module load x"}, "setup: must be a list"),
        (None, "lab: must be a mapping"),
        ({**LAB, "partitions": "x"}, "lab: partitions"),
        ({**LAB, "mirror": {**MIRROR, "home": "relative"}}, "mirror.home"),
        ({**LAB, "mirror": {**MIRROR, "host": "me:secret@login"}}, "mirror.host"),
        ({**LAB, "mirror": {**MIRROR, "ports": "all"}}, "mirror.ports"),
    ],
)
def test_wrong_entry_is_refused_without_its_values(tmp_path, entry, says):
    with pytest.raises(InvalidValue, match=says) as refused:
        owners(tmp_path, lab=entry).clusters()
    assert "secret" not in str(refused.value)


def test_token_is_read_from_a_private_file_only(tmp_path):
    path = tmp_path / "token"
    path.write_text("abc\n")
    path.chmod(0o644)
    farm = Clusters.model_validate({"named": {"farm": {**FARM, "token_file": str(path)}}}).named["farm"]
    with pytest.raises(InvalidValue, match="Others can read"):
        farm.token()
    path.chmod(0o600)
    assert farm.token() == "abc"


def test_room_of_a_node_is_that_of_its_members():
    resources = {"trainer": {"gpus": 1, "memory_mb": 8000}, "environment": {"cpus": 12}}
    section = LauncherSection(threads=4, resources=resources)
    room = section.room()
    assert (room.cpus, room.gpus, room.memory_mb) == (1 + 4 + 4 + 12, 1, 8000)
    section.nodes = 2  # the environment moves to the other node
    assert (section.room().cpus, section.room().gpus) == (12, 1)
    section.nodes, section.inference_gpus, section.num_processes = 1, 2, 3
    assert section.room().gpus == 1 + 2  # what is said of the trainer counts
    section.resources = {}
    assert section.room().gpus == 3 + 2
    section.device = "cpu"
    assert section.room().gpus == 0
    section.device, section.inference_gpus = "cuda", 0
    assert section.room().gpus == 3  # inference shares them
    for wrong in ({"trainr": {}}, {"trainer": {"gpu": 1}}, {"trainer": {"cpus": 0}}):
        with pytest.raises(ValueError, match="trainr|trainer.gpu|trainer.cpus"):
            section.resources = wrong


def test_preview_says_what_the_engine_would_be_asked_for(tmp_path, harness):
    home, specification = owners(tmp_path, lab=LAB), harness.specification(threads=3)
    assert describe_job(specification, home) == ""
    specification.config.launcher.kind = "slurm"
    specification.config.launcher.time_limit_minutes = 90
    said = describe_job(specification, home)
    for part in ("the cluster lab", "--nodes=1", "--cpus-per-task=8", "--partition=gpu", "--time=90"):
        assert part in said
    assert describe_job(specification, owners(tmp_path / "mirrored", lab={**LAB, "mirror": MIRROR})) == said
    specification.config.launcher.kind, specification.kind = "slurm", "sweep"
    assert "Its runs would be jobs on the cluster lab. Each asks from Slurm: --nodes=1" in describe_job(
        specification, home
    )
    specification.config.launcher.kind, specification.config.launcher.nodes = "ray", 3
    specification.kind = "train"
    assert "Ray: 7 CPUs, on each of 3 nodes, at " in describe_job(specification, owners(tmp_path / "other", farm=FARM))
    specification.config.launcher.kind = "slurm"
    (home.configuration / "clusters.yaml").unlink()
    with pytest.raises(InvalidValue, match="has no slurm cluster"):
        describe_job(specification, home)


def levels(home, house, **named):
    found = list(check_cluster(home, "lab", engine=lambda _: house.engine, **named))
    return {finding.level for finding in found}, " ".join(finding.text for finding in found)


def test_doctor_says_what_a_cluster_lacks(tmp_path, local_house, monkeypatch):
    monkeypatch.setattr(cluster, "_FILE_S", 0.2)
    home = owners(tmp_path, lab={**LAB, "python": "/nowhere/python"})
    found, said = levels(home, local_house)
    assert "broken" in found and "ended without an answer" in said
    local_house.engine.silent = True
    assert levels(home, local_house)[0] == {"broken"}
    local_house.engine.silent, local_house.engine.waits = False, True
    found, said = levels(home, local_house, limit_s=0.1)
    assert "broken" in found and "Resources" in said and local_house.engine.cancelled
    assert levels(owners(tmp_path / "other", farm=FARM), local_house)[0] == {"broken"}


def test_doctor_tells_that_a_line_of_setup_failed(tmp_path, local_house, monkeypatch):
    home = owners(tmp_path, lab={**LAB, "python": sys.executable})
    submit = local_house.engine.submit

    def fail_in_setup(request):
        request.log.write_text("slurm_script: 2: module: not found\n")
        submit(request)

    monkeypatch.setattr(local_house.engine, "submit", fail_in_setup)
    found, said = levels(home, local_house)
    assert "warning" in found and "the job wrote: slurm_script: 2: module: not found" in said


def test_probe_finds_locks_that_are_not_carried(tmp_path):
    (tmp_path / probe.HELD).touch()
    facts = probe.facts(tmp_path)
    assert facts["locks"] and not facts["lock_carried"] and abs(facts["clock_ahead_s"]) < 5
    refusals = [one for one in _judge("lab", facts | {"pidfd": False}, "") if "pidfd_open" in one.text]
    assert [one.level for one in refusals] == ["broken"] and facts["pidfd"]
