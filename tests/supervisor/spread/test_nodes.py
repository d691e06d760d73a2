"""The node of each member, and the nodes of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.run_harness import describe_nodes, eventually
from toprope.errors import ComponentFailed
from toprope.records.run.launch import Launch
from toprope.settings.sections.launcher import LauncherSection
from toprope.supervisor.spread import nodes, ray_step
from toprope.supervisor.spread.nodes import ENV_NODES, Node, Spread, find_nodes

LAUNCH = Launch(
    kind="slurm", cluster="lab", network="trusted", nodes=2, attempt=1, name="run-1.1", submitted_at=0.0, deadline=0.0
)
CREW = ("policy", "api", "trainer", "inference", "environment", "environment-2", "environment-3", "tracker")


def places(spread: Spread) -> dict[str, str | None]:
    return {member: (share.node.name if (share := spread.place(member)) else None) for member in CREW}


def gpus(spread: Spread, member: str) -> tuple[str, list[int] | None]:
    share = spread.place(member)
    assert share is not None
    return share.node.name, None if share.gpus is None else list(share.gpus)


def test_gpus_decide_about_trainer_and_inference_and_drivers_take_turns() -> None:
    plain = Spread([Node("a", "10.0.0.1"), Node("b", "10.0.0.2"), Node("c", "10.0.0.3")])
    assert places(plain) == {
        "policy": None, "api": "a", "trainer": "a", "inference": "a", "environment": "b", "environment-2": "c",
        "environment-3": "b", "tracker": None,
    }  # fmt: skip
    one = Spread([Node("a", "10.0.0.1"), Node("b", "10.0.0.2", gpus=8)])
    assert (places(one)["trainer"], places(one)["inference"], places(one)["api"]) == ("b", "b", "a")
    two = Spread([Node("a", "10.0.0.1", gpus=1), Node("b", "10.0.0.2", gpus=1)])
    assert (places(two)["trainer"], places(two)["inference"]) == ("a", "b")


def test_trainer_and_inference_get_the_gpus_that_they_need() -> None:
    one = Spread([Node("a", "10.0.0.1"), Node("b", "10.0.0.2", gpus=4)], section=LauncherSection(inference_gpus=2))
    assert (gpus(one, "inference"), gpus(one, "trainer")) == (("b", [2, 3]), ("b", [0]))
    assert (gpus(one, "api"), gpus(one, "environment")) == (("a", []), ("b", [0, 1, 2, 3]))
    shared = Spread([Node("a", "10.0.0.1", gpus=3)], section=LauncherSection(num_processes=2))
    assert (gpus(shared, "trainer"), gpus(shared, "inference")) == (("a", [0, 1]), ("a", [0]))
    asked = LauncherSection(resources={"trainer": {"gpus": 2}, "inference": {"gpus": 1}})
    own = Spread([Node("a", "10.0.0.1", gpus=3)], section=asked)
    assert (gpus(own, "trainer"), gpus(own, "inference")) == (("a", [0, 1]), ("a", [2]))
    uncounted = Spread([Node("a", "10.0.0.1", None), Node("b", "10.0.0.2", None)])
    assert (gpus(uncounted, "trainer"), gpus(uncounted, "environment")) == (("a", None), ("b", None))


def test_member_of_a_lost_node_gets_gpus_that_are_free_elsewhere() -> None:
    section = LauncherSection(inference_gpus=2, num_processes=2)

    def spread(*counts: int) -> Spread:
        made = Spread([Node(name, "10.0.0.1", n) for name, n in zip("abcd", counts, strict=False)], section=section)
        made.place("trainer"), made.place("inference")
        return made

    inference = spread(4, 4)
    assert (gpus(inference, "trainer"), gpus(inference, "inference")) == (("a", [0, 1]), ("b", [2, 3]))
    inference.lose(inference.nodes[1])
    assert (gpus(inference, "inference"), gpus(inference, "trainer")) == (("a", [2, 3]), ("a", [0, 1]))
    trainer = spread(0, 2, 2, 3)
    assert (gpus(trainer, "trainer"), gpus(trainer, "inference")) == (("b", [0, 1]), ("c", [0, 1]))
    trainer.lose(trainer.nodes[1])  # inference stays where it runs
    assert (gpus(trainer, "inference"), gpus(trainer, "trainer")) == (("c", [0, 1]), ("d", [0, 1]))
    trainer.lose(trainer.nodes[3])
    assert gpus(trainer, "trainer") == ("c", [0, 1])  # none is free; it has these two
    few = spread(0, 2, 3)
    few.lose(few.nodes[2])
    few.lose(few.nodes[1])
    assert gpus(few, "inference") == gpus(few, "trainer") == ("a", [])


def test_lost_node_gets_no_member_but_the_keepers_own_stays() -> None:
    spread = Spread([Node("a", "10.0.0.1"), Node("b", "10.0.0.2", gpus=1)])
    spread.lose(spread.nodes[1])
    assert set(places(spread).values()) == {"a", None}
    spread.lose(spread.nodes[0])
    assert set(places(spread).values()) == {"a", None}


def test_nodes_are_read_from_the_variable() -> None:
    nodes = [Node("a", "10.0.0.1"), Node("b", "10.0.0.2", 2, ("ssh", "b"))]
    found = find_nodes(None, {ENV_NODES: describe_nodes(nodes, "trusted")})
    assert found is not None
    assert (found.nodes, found.network) == (nodes, "trusted")
    assert find_nodes(None, {}) is None
    assert find_nodes(LAUNCH.model_copy(update={"nodes": 1}), {}) is None  # nothing to spread over


def test_nodes_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '"show hostnames n[1-2]") echo n1; echo n2;;\n'
        '"-o show node n1") echo "NodeName=n1 NodeAddr=10.9.0.1 Sockets=1";;\n'
        '"-o show node n2") echo "NodeName=n2 NodeAddr=10.9.0.2 Gres=nic:1,gpu:a100:4(S:0) Sockets=1";;\n'
        "*) echo no such thing >&2; exit 1;; esac\n"
    )
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"}
    found = find_nodes(LAUNCH, asked | {"SLURM_GPUS_ON_NODE": "4"})
    assert found is not None and found.network == "trusted"
    first, second = found.nodes
    assert (first.name, first.address, first.command, first.is_far, first.gpus) == ("n2", "10.9.0.2", (), False, 4)
    assert (second.name, second.address, second.is_far) == ("n1", "10.9.0.1", True)
    assert second.command[0] == "srun" and "--nodelist=n1" in second.command
    without = find_nodes(LAUNCH, asked)  # Slurm counts the GPUs of n2 and gave none; of n1 it counts none
    assert without is not None and [node.gpus for node in without.nodes] == [0, None]
    with pytest.raises(ComponentFailed, match="no such thing"):
        find_nodes(LAUNCH, asked | {"SLURM_JOB_NODELIST": "n[3-4]"})


@pytest.fixture
def ray_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a Ray on PATH whose interpreter leaves its parent, does something, waits for the end of its input and then
    leaves a file."""

    def says(text: str) -> Path:
        ended = tmp_path / "ended"
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\necho "$@" >{tmp_path}/asked\nexec 3<&0\n'
            f"{{ {text}; exec >&-; cat <&3 >/dev/null; touch {ended}; }} &\n"
        )
        for program in (python, tmp_path / "ray"):
            program.touch()
            program.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return ended

    return says


def test_nodes_of_ray_are_reserved_as_long_as_they_are_used(tmp_path: Path, ray_says: Callable[[str], Path]) -> None:
    told = [{"address": "10.9.0.1"}, {"address": "10.9.0.2", "id": "bb", "gpus": ["1", "3"]}]
    ended = ray_says(f"echo '{json.dumps(told)}'")
    needed = {"trainer": {"gpus": 2, "memory_mb": 500}, "environment": {"cpus": 7}}
    section = LauncherSection(nodes=2, resources=needed, features=["ssd"])
    found = find_nodes(LAUNCH.model_copy(update={"kind": "ray"}), {}, section)
    assert found is not None
    first, second = found.nodes
    assert (first.name, first.gpus, first.command, first.is_far) == ("10.9.0.1", 2, (), False)
    assert (second.name, second.gpus, second.command[-2:], second.is_far) == ("10.9.0.2", 2, ("bb", "1,3"), True)
    asked = (tmp_path / "asked").read_text()
    assert asked.strip().endswith('--nodes 2 {"CPU": 7, "GPU": 2, "memory": 500000000, "ssd": 0.001}')
    assert not ended.exists()
    found.close()
    eventually(ended.exists)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("true", "could not be asked for 1 further nodes"),
        ("sleep 60", "could not be asked for 1 further nodes"),
        ("echo '[]'", "no room on 1 further nodes for 3 CPUs, 0 GPUs and .* MB, ssd on each"),
    ],
)
def test_ray_without_room_on_further_nodes_starts_nothing(
    ray_says: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, answer: str, told: str
) -> None:
    monkeypatch.setattr(nodes, "_ASK_S", 0.2 if answer == "sleep 60" else 60.0)
    ray_says(answer)
    with pytest.raises(ComponentFailed, match=told):
        find_nodes(LAUNCH.model_copy(update={"kind": "ray"}), {}, LauncherSection(nodes=2, features=["ssd"]))


def test_ray_that_gives_no_room_is_told_from_ray_that_cannot_be_asked(monkeypatch, capsys):
    group = SimpleNamespace(wait=lambda seconds: False)
    named = {"placement_group": lambda bundles, strategy: group, "placement_group_table": None}
    node = {"NodeID": "aa", "NodeManagerAddress": "10.9.0.1", "Alive": True, "Resources": {"CPU": 1.0}}
    ray = SimpleNamespace(nodes=lambda: [node], get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "aa"))
    monkeypatch.setattr(ray_step, "_connect", lambda: ray)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(**named))
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=None)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    assert ray_step.reserve_nodes(2, {"CPU": 9}) == 1
    told = capsys.readouterr()
    assert told.out == "[]\n" and "no 1 further nodes have room" in told.err


def test_ray_is_told_the_address_at_which_this_node_reaches_it(monkeypatch):
    """Nodes that share /tmp would else take the address that the last of them cached there."""
    given = {}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **named: given.update(named)))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    ray_step._connect()
    assert (given["address"], given["_node_ip_address"]) == ("127.0.0.1:6379", "127.0.0.1")
    given.clear()
    monkeypatch.delenv("RAY_ADDRESS")
    ray_step._connect()
    assert given["address"] == "auto" and "_node_ip_address" not in given
