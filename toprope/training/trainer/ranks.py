"""The processes that train one policy together. Rank 0 leads; the others follow its orders.

Weights, gradients and moments are split between the ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`): over NCCL on
GPUs, over gloo on CPUs. Accelerate gives precision and clipping on each rank; it starts no ranks, because it does not
shard on CPUs, and one path for both can be tested without a GPU.

Every rank has the whole batch and computes its share of the rows. Outside of a step a rank other than 0 waits for an
order, so that operations of all ranks come in the same order everywhere. Ranks find each other by a file in the run's
folder and speak over loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed

from toprope.records.messages import (
    ENV_CHECKPOINT,
    ENV_COMPONENT,
    ENV_FOLDER,
    ENV_REPORT_FD,
    ENV_SECRET,
    Peers,
    encode_line,
)
from toprope.training.component.member import CrewMember
from toprope.training.trainer.batch_source import GroupBatch
from toprope.training.trainer.optimization import all_finite

_ENV_RANK, _ENV_STORE = "TOPROPE_RANK", "TOPROPE_RANK_STORE"
_PATIENCE = timedelta(days=365)
"""A rank may wait for an order as long as a run may be paused; a rank that dies is noticed at once."""
_LAST_WORDS_S = 10.0
_END_S = 20.0


class Train(msgspec.Struct, tag="train"):
    """Take the next step, at the leader's learning rates."""

    batch: GroupBatch
    rates: list[float]


class Gather(msgspec.Struct, tag="gather"):
    """Take part in gathering the trained weights."""


class Save(msgspec.Struct, tag="save"):
    """Write this rank's part of a checkpoint into a folder."""

    folder: str


class End(msgspec.Struct, tag="end"):
    """End; nothing follows."""


RankOrder = Train | Gather | Save | End


class Ranks:
    """This process among those that train together.

    Args:
        number: This process's rank.
        count: Number of ranks.
        device: `cpu` or `cuda`.
        store: File by which the ranks find each other; None for a process that trains alone.
    """

    def __init__(self, number: int = 0, count: int = 1, device: str = "cpu", store: Path | None = None) -> None:
        self.number, self.count, self._device, self._store = number, count, device, store
        if store is not None and device == "cuda":
            torch.cuda.set_device(number)
        self._followers: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()

    @property
    def leads(self) -> bool:
        """True for rank 0, and for a process that trains alone."""
        return self.number == 0

    @property
    def alone(self) -> bool:
        """True if one process trains."""
        return self.count == 1

    @classmethod
    def lead(cls, member: CrewMember, count: int, device: str, policy: Path, checkpoint: Path | None) -> Ranks:
        """Starts the other ranks, which run this program too. They get everything but the API's address and secret."""
        store = member.folder.crew / f"ranks-{os.getpid()}"
        store.unlink(missing_ok=True)
        ranks = cls(0, count, device, store)
        variables = os.environ | {ENV_FOLDER: str(member.folder.path), ENV_COMPONENT: member.name, ENV_SECRET: "-"}
        variables |= {_ENV_STORE: str(store)} | ({} if checkpoint is None else {ENV_CHECKPOINT: str(checkpoint)})
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            for number in range(1, count):
                follower = subprocess.Popen(
                    [sys.executable, "-P", "-m", "toprope.training.trainer", *sys.argv[1:]],
                    stdin=subprocess.PIPE,
                    env=variables | {_ENV_RANK: str(number), ENV_REPORT_FD: str(null)},
                    pass_fds=[null],
                )
                assert follower.stdin is not None
                follower.stdin.write(encode_line(Peers({"policy": str(policy)})))
                follower.stdin.flush()  # it stays open: its end tells the follower that this process is gone
                ranks._followers.append(follower)
                threading.Thread(target=ranks._watch, args=(number, follower), daemon=True).start()
        finally:
            os.close(null)
        return ranks

    @classmethod
    def follow(cls, count: int, device: str) -> Ranks | None:
        """This process as a rank that follows; None if it was not started as one."""
        number = os.environ.get(_ENV_RANK)
        return None if number is None else cls(int(number), count, device, Path(os.environ[_ENV_STORE]))

    def meet(self) -> None:
        """Waits for the other ranks."""
        if self._store is None:
            return
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, loopback)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo",
            store=distributed.FileStore(str(self._store), self.count),  # type: ignore[attr-defined]
            rank=self.number,
            world_size=self.count,
            timeout=_PATIENCE,
        )

    def _watch(self, number: int, follower: subprocess.Popen[bytes]) -> None:
        code = follower.wait()
        if self._closing.is_set():
            return
        # Operations on a GPU would wait for the dead rank for ever. Those on a CPU fail, and say more.
        if not self._closing.wait(_LAST_WORDS_S):
            print(f"rank {number} of the trainer ended with status {code}", file=sys.stderr, flush=True)
            os._exit(1)

    def close(self, *, failed: bool = False) -> None:
        """Ends the other ranks. After a failure they may wait for this one, so they get no order but a signal."""
        if self.alone or not self.leads:
            return
        self._closing.set()
        if not failed:
            self.order(End())
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.close()
            try:
                follower.wait(0 if failed else _END_S)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()
        assert self._store is not None
        self._store.unlink(missing_ok=True)

    def order(self, order: RankOrder) -> None:
        """Sends an order to all other ranks. Only rank 0 calls it, and takes part in what it ordered."""
        if self.alone:
            return
        content = bytearray(msgspec.msgpack.encode(order))
        distributed.broadcast(torch.tensor([len(content)]), 0)
        distributed.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0)

    def next_order(self) -> RankOrder:
        """Waits for the next order of rank 0."""
        length = torch.zeros(1, dtype=torch.long)
        distributed.broadcast(length, 0)
        content = torch.zeros(int(length), dtype=torch.uint8)
        distributed.broadcast(content, 0)
        order: RankOrder = msgspec.msgpack.decode(content.numpy().tobytes(), type=RankOrder)
        return order

    def shares(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        """This rank's part of some row numbers, in passes of at most `size`; 0: in one pass.

        Every rank gets the same number of passes, some of them empty, because a pass is an operation of all ranks.
        """
        rows_per_rank = -(-len(numbers) // self.count)
        own_numbers = list(numbers[self.number * rows_per_rank : (self.number + 1) * rows_per_rank])
        size = size or max(rows_per_rank, 1)
        return [own_numbers[start : start + size] for start in range(0, rows_per_rank, size)]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest value over all ranks, element by element."""
        return self._reduce(values, distributed.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.alone:
            return values
        values = values.detach().clone()
        distributed.all_reduce(values, operation)
        return values

    def shard(self, model: Any) -> Any:
        """Splits the parameters of a model, layer by layer, or those of a small module; returns it."""
        if self.alone:
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # half a second that others save

        mesh = init_device_mesh(self._device, (self.count,))
        layers = set(getattr(model, "_no_split_modules", None) or ())
        # Quantized weights are frozen and have no rows to split: every rank keeps them whole.
        quantized = {value for value in model.parameters() if not value.is_floating_point()}
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, ignored_params=quantized)
        fully_shard(model, mesh=mesh, ignored_params=quantized)
        return model

    def mirrors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors that rank 0 publishes from: the trained ones themselves, or room for whole ones on the CPU."""
        if self.alone or not self.leads:
            return dict(tensors)
        return {name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items()}

    def gather(self, tensors: Mapping[str, torch.Tensor], mirrors: Mapping[str, torch.Tensor]) -> None:
        """Fills rank 0's mirrors with the whole tensors. An operation of all ranks."""
        if self.alone:
            return
        with torch.no_grad():
            for name, value in tensors.items():
                gathered = whole(value)
                if self.leads:
                    mirrors[name].copy_(gathered)

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole tensors on rank 0's CPU, an empty dictionary elsewhere. An operation of all ranks.

        Tensors that share their memory still do.
        """
        whole_tensors: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for value in tensors.values():
                if id(value) not in whole_tensors:
                    gathered = whole(value.detach())
                    whole_tensors[id(value)] = gathered.cpu() if self.leads else gathered[:0]
        return {name: whole_tensors[id(value)] for name, value in tensors.items()} if self.leads else {}

    def are_finite(self, tensors: Iterable[torch.Tensor]) -> bool:
        """True if all values are finite, on all ranks. An operation of all ranks."""
        finite = all_finite(local_part(value) for value in tensors)
        return not bool(self.largest(torch.tensor([not finite], dtype=torch.uint8)))


def is_split(value: torch.Tensor) -> bool:
    """True for a tensor of which this rank has a part."""
    return hasattr(value, "full_tensor")


def whole(value: Any) -> torch.Tensor:
    """The whole of a tensor that may be split. An operation of all ranks."""
    tensor: torch.Tensor = value.full_tensor() if is_split(value) else value
    return tensor


def local_part(value: Any) -> torch.Tensor:
    """This rank's part of a tensor that may be split."""
    tensor: torch.Tensor = value.to_local() if is_split(value) else value
    return tensor


def own_rows(like: Any) -> slice:
    """The rows of a tensor that this rank has: `fully_shard` makes chunks of equal size."""
    if not is_split(like):
        return slice(None)
    rows_per_rank = -(-like.size(0) // like.device_mesh.size())
    first = min(like.device_mesh.get_local_rank() * rows_per_rank, like.size(0))
    return slice(first, min(first + rows_per_rank, like.size(0)))


def from_rows(rows: torch.Tensor, like: Any) -> torch.Tensor:
    """A tensor that is split as `like` is, from this rank's rows of it."""
    if not is_split(like):
        return rows
    from torch.distributed.tensor import DTensor, Shard

    local, mesh = rows.to(like.device), like.device_mesh
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())


def settle(model: Any) -> None:
    """Splits the parameters again that a forward pass without a backward pass left whole."""
    if hasattr(model, "reshard"):
        model.reshard()
