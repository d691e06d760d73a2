"""A Slurm of two nodes on this machine, from Debian's packages slurm-wlm and munge: `make bench-slurm`.

The benchmark runs real crews through every fault of the matrix, then the demo over both nodes. Five to ten minutes.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cluster.house import Daemons, Net, keeper_of, kill_all, missing, wait_until
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch
from toprope.settings.clusters import Cluster
from toprope.supervisor.launchers.slurm import SlurmEngine

__all__ = ["SlurmHouse", "why_not"]

_CPUS, _MEMORY_MB, _GPUS = 8, 16_000, 2
"""Of each node, whatever the machine has."""
_LOST_AFTER_S = 10
_CONF = """
ClusterName=toprope
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
GresTypes=gpu
JobSubmitPlugins=lua
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout={lost_after}
SlurmctldTimeout=30
KillWait=30
MinJobAge=300
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_SUBMIT = """
function slurm_job_submit(job, partitions, user)
    if job.account == "{spent}" then
        slurm.log_user("{quota}")
        return 2050  -- ESLURM_ACCOUNTING_POLICY
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
"""


def why_not() -> str:
    """Say what is missing for a Slurm here; empty if nothing is."""
    return missing("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel")


class SlurmHouse:
    """See `House`. Sets SLURM_CONF in this process's environment, for daemons and commands."""

    nodes, spent, quota = ("n1", "n2"), "spent", "its quota is used up; try again next month"

    def __init__(self, folder: Path, python: str, hidden: Path | None = None) -> None:
        """Start everything.

        Args:
            folder: For the daemons' files.
            python: The nodes' interpreter.
            hidden: A folder of this machine that is empty on the nodes.
        """
        self._folder, self._hidden = folder, hidden
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)  # munge refuses a socket that others cannot reach
        self.net = Net(["head", *self.nodes])
        self._daemons = Daemons(folder / "logs")
        self._former = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        self.cluster = Cluster(kind="slurm", python=python, config=str(folder / "slurm.conf"), network="trusted")
        self.engine = SlurmEngine(self.cluster)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        key, folder = self._folder / "munge.key", self._folder
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={self.net.addresses[name]} CPUs={_CPUS} "
            f"RealMemory={_MEMORY_MB} Gres=gpu:{_GPUS} State=UNKNOWN"
            for name in self.nodes
        )
        for number in range(_GPUS):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{_GPUS - 1}]\n")
        (folder / "job_submit.lua").write_text(_SUBMIT.format(spent=self.spent, quota=self.quota))
        (folder / "slurm.conf").write_text(
            _CONF.format(head=self.net.addresses["head"], folder=folder, nodes=nodes, lost_after=_LOST_AFTER_S)
        )
        munged = shutil.which("munged") or "/usr/sbin/munged"
        files = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("key-file", "pid-file", "log-file")]
        self._daemons.start(
            "munged",
            [munged, "--foreground", "--force", f"--socket={folder}/munge.socket", f"--seed-file={folder}/munge.seed"]
            + files,
        )
        wait_until((folder / "munge.socket").exists, "munged")
        self._start_controller()
        self.mend()

    def _start_controller(self) -> None:
        self._on("head", "slurmctld", shutil.which("slurmctld") or "/usr/sbin/slurmctld", "-D")

    def _on(self, node: str, name: str, *command: str) -> None:
        apart, hide = ["--uts"], ""
        if self._hidden is not None:
            apart, hide = ["--uts", "--mount"], f"mount -t tmpfs none {shlex.quote(str(self._hidden))} && "
        inside = ["unshare", *apart, "sh", "-c", f'hostname "$0" && {hide}exec "$@"', node, *command]
        self._daemons.start(name, [*self.net.enter(node), *inside])

    def mend(self) -> None:
        """See `House.mend`."""
        if "slurmctld" not in self._daemons.running:
            self._start_controller()
        for name in self.nodes:
            known = self._daemons.running.get(name)
            if known is None or known.poll() is not None:
                self._on(name, name, shutil.which("slurmd") or "/usr/sbin/slurmd", "-D", "-N", name)
        wait_until(lambda: self._idle() == len(self.nodes), "both nodes")

    def _idle(self) -> int:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False)
        return sum(line.strip() in ("idle", "mixed", "allocated") for line in done.stdout.splitlines())

    def cancel(self, folder: RunFolder) -> None:
        """See `House.cancel`."""
        launch = Launch.read(folder)
        assert launch is not None
        subprocess.run(["scancel", f"--name={launch.name}"], check=True)

    def kill_engine_process(self, folder: RunFolder) -> None:
        """See `House.kill_engine_process`: slurmstepd."""
        stepd = keeper_of(folder).parent()
        assert stepd is not None and "slurmstepd" in stepd.name(), stepd
        stepd.kill()

    def kill_daemon(self, folder: RunFolder) -> None:
        """See `House.kill_daemon`: slurmd."""
        self._daemons.kill(self.net.node_of(keeper_of(folder).pid))

    def kill_node(self, folder: RunFolder) -> None:
        """See `House.kill_node`."""
        node = self.net.node_of(keeper_of(folder).pid)
        kill_all(self.net.processes(node))
        self._daemons.kill(node)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """See `House.unreachable`."""
        self._daemons.kill("slurmctld", signal.SIGTERM)  # killed, it forgets the jobs of the last seconds
        try:
            yield
        finally:
            self.mend()

    @contextmanager
    def full(self) -> Iterator[Sequence[str]]:
        """See `House.full`: the partition is down."""
        command = ["scontrol", "update", "PartitionName=main"]
        subprocess.run([*command, "State=DOWN"], check=True)
        try:
            yield ()
        finally:
            subprocess.run([*command, "State=UP"], check=True)

    def close(self) -> None:
        """End everything that the house started."""
        for name in self.nodes:
            kill_all([one for one in self.net.processes(name) if one.pid != os.getpid()])
        self._daemons.close()
        self.net.close()
        if self._former is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._former


if __name__ == "__main__":
    from benchmarks.cluster.bench import measure

    sys.exit(measure("slurm", why_not, SlurmHouse, start_goal_s=12))
