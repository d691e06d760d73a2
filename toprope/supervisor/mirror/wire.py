"""Both ends' view of a mirrored run: its key, the files that are mirrored, and the client.

POST /begin                      a job begins: what it needs; 409 if another one has its place
GET  /file?path=P&at=N           at most CHUNK bytes of a file from offset N; X-Size is its whole size
PUT  /file?path=P&at=N&head=H    append a body to a file of N bytes with the SHA-256 H; 412 says what is there
     &anew=1                     the same, to an empty file in its place
     &whole=1                    replace a file at once
POST /pass                       a look at the folder is complete: names, signs of life; answers orders and wishes
POST /facts                      a node's facts, for `toprope doctor`
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from pathlib import Path
from typing import Any

import httpx2 as httpx

from toprope.atomic import open_plain
from toprope.supervisor.spread.credentials import contexts, make_identity

CHUNK = 4 << 20
WHOLE = 16 << 20
"""Most bytes of a file that is replaced at once."""
_ANSWER_S = 20.0
_FIRST = ("/begin", "/facts")
"""Requests that come first, so that an answer without the right key means another key."""
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MIRRORED = re.compile(
    r"(?!(?i:spec\.json|launch\.json|keeper\.lock|kept\.json|wanted\.json|logs/mirror\.log(?:\.1)?)\Z)"
    r"(?!(?i:orders|crew|evaluations|journal|checkpoints|logs|standard)\Z)"
    rf"(?:{_NAME}|(?:evaluations|journal|logs|standard)/{_NAME}|checkpoints/\.step-[0-9]{{6,12}}(?:/{_NAME}){{1,4}})"
)
"""Paths that the cluster's side may write. The server owns all others, hidden ones and those of orders among
them, in capitals too: some file systems take them for the same."""


is_step = re.compile(r"step-[0-9]{6,12}").fullmatch
"""Matches the name of a checkpoint."""


class Refused(Exception):
    """The server has given the run's place to another job, or its key is another."""


def is_mirrored(path: str) -> bool:
    """True if the cluster's side may write this path of a run folder, as a string from the wire."""
    return _MIRRORED.fullmatch(path) is not None


def run_key(cluster: str, run_id: str, attempt: int) -> bytes:
    """Return the key of an attempt, from the cluster's key."""
    return _derived(cluster.encode(), f"toprope mirror {run_id}.{attempt}")


def bearer(key: bytes) -> str:
    """Return the header by which the far side shows that it has the run's key."""
    return f"Bearer {_derived(key, 'bearer').hex()}"


def tls(key: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of server and client for a run's key."""
    return contexts(make_identity(_derived(key, "tls")))


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, purpose.encode(), "sha256")


class Prefix:
    """The length and the running SHA-256 of the first bytes of a file."""

    def __init__(self) -> None:
        self.size, self._hash = 0, hashlib.sha256()

    @property
    def head(self) -> str:
        return self._hash.hexdigest()

    def feed(self, data: bytes) -> None:
        """Go on by the bytes that follow."""
        self._hash.update(data)
        self.size += len(data)

    @classmethod
    def of(cls, path: Path, size: int | None = None) -> Prefix:
        """Read the first `size` bytes of a file, all when None; a missing file is empty."""
        prefix = cls()
        try:
            with open_plain(path) as file:
                while data := file.read(CHUNK if size is None else min(CHUNK, size - prefix.size)):
                    prefix.feed(data)
        except FileNotFoundError:
            pass
        return prefix


class Wire:
    """A client of a run's server side. Raises httpx.HTTPError for whatever may work later.

    Args:
        server: HOST:PORT.
        key: The run's key.
        trusted: The owner trusts the network, so nothing is encrypted.
        keeper: Tells this job from others of the run.
    """

    def __init__(self, server: str, key: bytes, *, trusted: bool, keeper: str = "") -> None:
        self._client = httpx.Client(
            base_url=f"{'http' if trusted else 'https'}://{server}",
            verify=False if trusted else tls(key)[1],
            headers={"Authorization": bearer(key), "X-Keeper": keeper},
            timeout=_ANSWER_S,
            trust_env=False,
        )

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return its answer, 412 and 507 included.

        Raises:
            Refused: The server does not take this job's word (any more).
            httpx.HTTPError: There was no answer, or it says that the server has trouble.
        """
        answer = self._client.request(method, path, **options)
        # Later another run's server side may have the port for a while, on a network without TLS.
        if answer.status_code == 409 or (path in _FIRST and answer.status_code in (401, 403, 404)):
            raise Refused(answer.text[:300] or f"the server answered {answer.status_code}")
        if answer.status_code not in (412, 507):
            answer.raise_for_status()
        return answer

    def fetch(self, path: str, target: Path) -> None:
        """Copy a file of the server's to `target`."""
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with target.open("wb") as file:
            while True:
                answer = self.ask("GET", "/file", params={"path": path, "at": file.tell()})
                file.write(answer.content)
                if file.tell() >= int(answer.headers["X-Size"]):
                    return
