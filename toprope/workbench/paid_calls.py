"""Programs that call the owner's priced models and are no runs: confirmed by a person, and reserved in the ledger."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.errors import NotPossibleNow
from toprope.records.purse import FILE as SPENDING
from toprope.records.purse import LIMITS, read_spending
from toprope.records.run.folder import read_json
from toprope.settings.endpoints import Endpoint
from toprope.settings.owner import Home
from toprope.supervisor.capacity.budget_ledger import enter_program, ledger_lock
from toprope.supervisor.notices import tell
from toprope.supervisor.runs.freezing import require_thawed
from toprope.workbench.approvals import Approvals
from toprope.workbench.launch.budgets.reserve_budget import reserve_calls
from toprope.workbench.launch.preview import HASH_LENGTH
from toprope.workbench.launch.start import how_to_approve


def reserve_paid_calls(
    home: Home, name: str, folder: Path, models: Mapping[str, Endpoint], content: Any, text: str, *, goes_on: bool
) -> None:
    """Reserve what a program's calls may cost, once a person has confirmed it if the owner wants that.

    Args:
        name: The program's name in the ledger.
        folder: Holds its lock (`job.lock`) and its account; made if need be.
        models: The models that it calls.
        content: JSON that tells this program from others, for the hash to confirm.
        text: The program in words.
        goes_on: It continues after a crash, with what is left of its own limit.

    Raises:
        NoRoomWithin: A limit on cost leaves nothing, or a model has no price.
        NotPossibleNow: The home is frozen, or a person must confirm it first.
    """
    require_thawed(home.path)
    limits, file = home.limits(), folder / LIMITS
    with ledger_lock(home.ensure().runs):
        frozen = reserve_calls(models, limits, home.runs, name)
        cap = frozen.caps.get("cost_usd")
        if not all(endpoint.prompt_usd == 0 and endpoint.completion_usd == 0 for endpoint in models.values()):
            _require_approval(home, content, text, ", ".join(models), None if cap is None else cap.value)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        spent = sum(read_spending(folder / SPENDING).values())
        before = float(read_json(file)["before"]) if goes_on and file.exists() else spent
        if cap is not None:
            per_run, total = limits.get("per_run.cost_usd"), spent + cap.value
            cap = cap.model_copy(update={"value": total if per_run is None else min(total, before + per_run.max)})
        reserved = {} if cap is None else {"cost_usd": max(0.0, cap.value - spent)}
        enter_program(home.runs, name, folder, reserved)
        caps = {} if cap is None else {"cost_usd": cap}
        record = frozen.model_copy(update={"caps": caps, "reserved": reserved})
        write_json(file, record.model_dump(mode="json") | {"before": before})


def _require_approval(home: Home, content: Any, text: str, models: str, most_usd: float | None) -> None:
    limits = home.limits()
    threshold = limits.above.get("cost_usd")
    above = threshold is not None and (most_usd is None or most_usd > threshold)
    if limits.confirm == "never" or (limits.confirm == "above" and not above):
        return
    digest = hashlib.sha256(json.dumps([content, most_usd is not None], sort_keys=True).encode()).hexdigest()
    digest = digest[:HASH_LENGTH]
    approvals = Approvals(home)
    if approvals.refused(digest):
        raise NotPossibleNow(f"Nothing was started: the owner refused this ({digest}).", hint="Ask the owner.")
    if approvals.use(digest):
        return
    most = "an unknown amount" if most_usd is None else f"up to {most_usd:.3g} USD"
    text = f"{text} with {models}: {most} for their answers"
    if approvals.ask(digest, text):
        tell(home, "waiting", f"A start waits for you: {text}. toprope approve {digest}", hash=digest)
    raise NotPossibleNow(
        f"Nothing was started: the owner wants this confirmed (confirm, set by {limits.source}): {text}.",
        hint=how_to_approve(digest),
    )
