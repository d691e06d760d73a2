"""The node of each member, and the nodes of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.run_harness import describe_nodes
from toprope.errors import ComponentFailed
from toprope.records.run.launch import Launch
from toprope.supervisor.spread import ray_step
from toprope.supervisor.spread.nodes import ENV_NODES, Node, Spread, find_nodes, share_of_gpus

LAUNCH = Launch(
    kind="slurm", cluster="lab", network="trusted", nodes=2, attempt=1, name="run-1.1", submitted_at=0.0, deadline=0.0
)
CREW = ("policy", "api", "trainer", "inference", "environment", "environment-2", "environment-3", "tracker")


def places(spread: Spread) -> dict[str, str | None]:
    return {member: (node.name if (node := spread.place(member)) else None) for member in CREW}


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


def test_inference_shares_the_gpus_of_a_node_only_with_the_trainer_there() -> None:
    one = Spread([Node("a", "10.0.0.1"), Node("b", "10.0.0.2", gpus=3)], inference_gpus=1)
    assert one.inference_gpus() == 1
    two = Spread([Node("a", "10.0.0.1", gpus=2), Node("b", "10.0.0.2", gpus=2)], inference_gpus=1)
    assert two.inference_gpus() is None
    ids = ["4", "5", "6"]
    assert [share_of_gpus(name, ids, 1) for name in ("trainer", "inference", "api")] == [["4", "5"], ["6"], ids]
    assert [share_of_gpus(name, ids, 0) for name in ("trainer", "inference")] == [ids, ["4"]]
    assert share_of_gpus("trainer", ["4"], 1) == ["4"]  # too few to share


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
        '"-o show node n2") echo "NodeName=n2 NodeAddr=10.9.0.2 Sockets=1";;\n'
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
    with pytest.raises(ComponentFailed, match="no such thing"):
        find_nodes(LAUNCH, asked | {"SLURM_JOB_NODELIST": "n[3-4]"})


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
