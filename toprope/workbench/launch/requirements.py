"""What a run needs of its surroundings, looked at before it starts: a run that must fail later is refused now.

Only what can be known without loading a model is looked at here; the run's own validation sees the rest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from toprope.errors import InvalidValue
from toprope.records.run.specification import Specification
from toprope.settings.owner import OwnerSettings
from toprope.settings.schema import Config

__all__ = ["require_interpreters", "require_wandb"]

_KEY = "WANDB_API_KEY"
_HOST = "wandb"


def require_interpreters(specification: Specification) -> None:
    """Passes where every interpreter that a run's environments need is there.

    Raises:
        InvalidValue: One is gone: its owner removed it since the draft was made.
    """
    for source in (specification.environment, *specification.mixture):
        if source.interpreter is not None and not Path(source.interpreter).exists():
            raise InvalidValue(
                f"The interpreter of {source.name}, {source.interpreter}, is gone.",
                hint=f"describe_environment says what {source.name} needs now; then select_environment makes a new "
                "draft, or the owner adds it again (toprope env add).",
            )


def require_wandb(
    config: Config, settings: OwnerSettings, settings_file: Path, surroundings: Mapping[str, str] | None = None
) -> None:
    """Passes where Weights & Biases is not to be reached, or there is a key for it.

    Raises:
        InvalidValue: logging.wandb is online and no key is known.
    """
    surroundings = os.environ if surroundings is None else surroundings
    if config.logging.wandb != "online":
        return
    given = (settings.variables.get(recipient, {}).get(_KEY) for recipient in ("*", "trainer"))
    if any(given) or surroundings.get(_KEY) or _logged_in(Path(surroundings.get("HOME", "/"))):
        return
    raise InvalidValue(
        f"logging.wandb is online, and there is no {_KEY}. Nothing was started.",
        hint=f"edit_config sets logging.wandb to offline, which writes the same files without a key (unless it is "
        f"locked). Or the owner puts the key into {settings_file}: variables: {{trainer: {{{_KEY}: <the key>}}}}.",
    )


def _logged_in(home: Path) -> bool:
    """Whether `wandb login` has left a key in the user's own file."""
    try:
        return _HOST in (home / ".netrc").read_text(errors="replace")
    except OSError:
        return False
