"""Weights that the trainer publishes on one node arrive on the other, whole and under their versions."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from toprope.records.weight_file import newest_version
from toprope.supervisor.spread.weights import WeightMirror, WeightSource
from toprope.training.policy.weight_sync import WeightFile, WeightReader


def run(tmp_path: Path, work: Callable[[Path, Path, str, WeightMirror], Awaitable[None]]) -> None:
    """Run `work` with the folders of two nodes, the URL of the first one's source and a mirror in the second one."""

    async def main() -> None:
        there, here = tmp_path / "there", tmp_path / "here"
        there.mkdir()
        here.mkdir()
        source, mirror = WeightSource(there, "secret"), WeightMirror(here, "secret")
        await work(there, here, await source.start(), mirror)
        mirror.close()
        await source.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def arrival(here: Path, version: int) -> None:
    while newest_version(here) != version:
        await asyncio.sleep(0.005)


def test_each_version_arrives(tmp_path: Path) -> None:
    async def work(there: Path, here: Path, url: str, mirror: WeightMirror) -> None:
        weights, copies = {"a": torch.zeros(3, 2), "b": torch.zeros(5)}, {"a": torch.ones(3, 2), "b": torch.ones(5)}
        file, reader = WeightFile(there, weights), WeightReader(here, copies)
        mirror.follow(url)
        assert reader.refresh() == 0
        for version in (1, 2, 3):
            weights["a"] += version
            weights["b"] -= version
            file.publish()
            await arrival(here, version)
            assert reader.refresh() == version
            assert torch.equal(copies["a"], weights["a"]) and torch.equal(copies["b"], weights["b"])
        weights["a"] += 1  # versions that nobody fetched in between
        for _ in range(2):
            file.publish()
        await arrival(here, 5)
        assert reader.refresh() == 5
        assert torch.equal(copies["a"], weights["a"])

    run(tmp_path, work)


def test_mirror_follows_a_restarted_trainer_back_to_its_checkpoint(tmp_path: Path) -> None:
    async def work(there: Path, here: Path, url: str, mirror: WeightMirror) -> None:
        weights, copies = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
        file, reader = WeightFile(there, weights), WeightReader(here, copies)
        mirror.follow(url)
        for _ in range(4):
            file.publish()
        await arrival(here, 4)
        again = tmp_path / "again"
        again.mkdir()
        weights["a"] += 7
        file = WeightFile(again, weights, -1)
        file.version = 1
        file.publish()
        source = WeightSource(again, "secret")
        mirror.follow(await source.start())
        await arrival(here, 2)
        assert reader.refresh() == 2
        assert torch.equal(copies["a"], weights["a"])
        await source.close()

    run(tmp_path, work)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}])
def test_weights_need_the_runs_secret(tmp_path: Path, headers: dict[str, str]) -> None:
    async def work(there: Path, here: Path, url: str, mirror: WeightMirror) -> None:
        WeightFile(there, {"a": torch.zeros(2)}).publish()
        request = urllib.request.Request(f"{url}/weights", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=20)
        refused.value.close()

    run(tmp_path, work)
