"""Ray, by the REST interface of its Jobs: plain HTTP, so the server needs no Ray.

Ray shows the entrypoint and the variables of a job to everybody with its token, so neither holds a secret.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx

from toprope.errors import InvalidValue, visible
from toprope.settings.clusters import Cluster
from toprope.supervisor.launchers.engine import Job, JobRequest, NotReached, Phase, Refused, Unreachable

_ANSWER_S = {"GET": 10.0, "POST": 30.0}
"""The first job of a Ray starts its job manager, which takes long."""
_RETRIES_S, _RETRY_EVERY_S = 20.0, 1.0
_PHASES: Mapping[str, Phase] = {"PENDING": "waiting", "RUNNING": "running"}


class RayEngine:
    """The Ray of one cluster. See `Engine`."""

    title = "Ray"

    def __init__(self, cluster: Cluster, transport: httpx.BaseTransport | None = None) -> None:
        self._cluster, self._transport = cluster, transport

    def submit(self, request: JobRequest) -> None:
        """See `Engine.submit`. Ray answers 500 to a second job of one id, so the id is looked up first."""
        try:
            existing = self._ask("GET", f"/api/jobs/{request.name}")
        except Unreachable as error:
            raise NotReached(str(error), hint="Nothing was started. Start it again once Ray answers.") from None
        if existing.status_code == httpx.codes.OK:
            return
        limit = time.monotonic() + _RETRIES_S
        answer = self._ask("POST", "/api/jobs/", json=self._job(request))
        while "try again later" in answer.text and time.monotonic() < limit:  # a node that has just started
            time.sleep(_RETRY_EVERY_S)
            answer = self._ask("POST", "/api/jobs/", json=self._job(request))
        if answer.status_code != httpx.codes.OK:
            raise Refused(
                f"Ray refused the job: {_summarize_answer(answer)}.",
                hint="Nothing was started. Change launcher.resources or features, or look at Ray's dashboard.",
            )

    def _job(self, request: JobRequest) -> dict[str, Any]:
        room = request.launcher.room()
        # Ray's shell would stay between Ray and the keeper and be killed alone; `exec` replaces it by the keeper. A
        # shell also redirects, and the log lies on shared storage.
        entrypoint = f"cd {shlex.quote(str(request.folder))} && exec {shlex.join(request.command)}"
        return {
            "submission_id": request.name,
            "entrypoint": f"{entrypoint} >> {shlex.quote(str(request.log))} 2>&1",
            "runtime_env": {},
            "entrypoint_num_cpus": room.cpus,
            "entrypoint_num_gpus": room.gpus,
            "entrypoint_memory": room.memory_mb * 1_000_000,
            "entrypoint_resources": dict.fromkeys(request.launcher.features, 0.001),
            "metadata": {"toprope": request.name},
        }

    def jobs(self) -> Mapping[str, Job]:
        """See `Engine.jobs`."""
        answer = self._ask("GET", "/api/jobs/")
        if answer.status_code != httpx.codes.OK:
            raise Unreachable(f"Ray answered: {_summarize_answer(answer)}.")
        try:
            listed = [entry for entry in answer.json() if entry.get("submission_id")]
            return {str(entry["submission_id"]): _job(entry) for entry in listed}
        except (ValueError, KeyError, AttributeError, TypeError):
            raise Unreachable(f"{self._cluster.address} answers, but not as Ray's Jobs interface does.") from None

    def cancel(self, name: str, *, running: bool = False) -> None:
        """See `Engine.cancel`. Ray does not carry it out for a job that it cannot place; the claim holds that one."""
        job = self.jobs().get(name)
        if job is not None and (job.phase == "waiting" or (running and job.phase == "running")):
            self._ask("POST", f"/api/jobs/{name}/stop")

    def describe(self, request: JobRequest) -> str:
        """See `Engine.describe`."""
        room = request.launcher.room()
        parts = [f"{room.cpus} CPUs", f"{room.gpus} GPUs" if room.gpus else ""]
        parts += [f"{room.memory_mb} MB" if room.memory_mb else "", " ".join(request.launcher.features)]
        parts += [f"on each of {request.launcher.nodes} nodes" if request.launcher.nodes > 1 else ""]
        return f"Ray: {', '.join(part for part in parts if part)}, at {self._cluster.address}"

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            token = self._cluster.token()
        except InvalidValue as error:
            raise Unreachable(str(error)) from None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with httpx.Client(timeout=_ANSWER_S[method], transport=self._transport, trust_env=False) as client:
                answer = client.request(method, self._cluster.address + path, headers=headers, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = visible(str(error), 120) or type(error).__name__
            raise Unreachable(f"{self._cluster.address} gave no answer ({reason}).") from None
        # A gateway that refuses a job, for a quota, has accepted the token: the id was looked up with it.
        if method == "GET" and answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            if not token:
                raise Unreachable(f"{self._cluster.address} asks for a token, the cluster's `token_file`.")
            raise Unreachable(f"{self._cluster.address} does not accept the token in {self._cluster.token_file!r}.")
        if answer.status_code >= httpx.codes.BAD_GATEWAY or answer.is_redirect:
            raise Unreachable(f"{self._cluster.address} answered {answer.status_code}.")
        return answer


def _job(entry: Mapping[str, Any]) -> Job:
    word = str(entry["status"])
    phase = _PHASES.get(word, "ended")
    message = visible(str(entry.get("message") or ""), 200).replace("\n", " ")
    return Job(
        str(entry["submission_id"]), phase, word, "" if phase == "running" else f"{word}: {message}".rstrip(": ")
    )


def _summarize_answer(answer: httpx.Response) -> str:
    """Return the last line of an answer, from outside and therefore shortened."""
    lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
    return f"{answer.status_code}, {visible(lines[-1] if lines else '', 300)}".rstrip(" ,.")
