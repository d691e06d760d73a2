"""Which environment variables a keeper and each member of its crew get: an allow-list, because the rest leaks.

A server inherits whatever its client or shell had, keys included, and user code runs in the crew. So a component gets
what programs need to run, what its task needs, and what the owner's settings name for it. Keys go to the one component
that uses them and never, unless the owner says so by name, to `environment`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from toprope.records import messages as crew
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification

__all__ = [
    "ALL_COMPONENTS",
    "OwnerVariables",
    "decode_owner_variables",
    "component_variables",
    "keeper_variables",
    "worker_variables",
    "secret_values",
]

ALL_COMPONENTS = "*"
"""In the owner's variables: for every component, but for keys that one component alone uses."""

OWNERS = "TOPROPE_OWNERS_VARIABLES"
"""How the owner's variables travel to the keeper: never in argv, and no component gets this one."""

OwnerVariables = Mapping[str, Mapping[str, str]]
"""Component (or EVERYONE) -> name -> value, from the owner's settings."""

_NAMES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH",
        "DYLD_FALLBACK_LIBRARY_PATH", "MPLCONFIGDIR", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT",
        "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_HOME",
    }
)  # fmt: skip
_PREFIXES = ("LC_", "XDG_")

_USERS = {"HF_TOKEN": "policy", "HUGGING_FACE_HUB_TOKEN": "policy", "WANDB_API_KEY": "trainer"}
"""Keys that the surroundings or the owner's variables for everyone may hold, and the one component that uses each."""

_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_SHORTEST_SECRET = 8


def _allowed(surroundings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in surroundings.items() if name in _NAMES or name.startswith(_PREFIXES)}


def _is_for(name: str, component: str, specification: Specification) -> bool:
    if name == "WANDB_API_KEY" and specification.config.logging.wandb != "online":
        return False
    if specification.trainer is not None and component == "trainer" and name in _USERS:
        return False  # user code: what the owner names for `trainer` it gets, and nothing that lies about
    return _USERS.get(name, component) == component


def keeper_variables(owners: OwnerVariables, surroundings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The keeper's whole environment.

    Args:
        owners: What the owner's settings give to components.
        surroundings: The environment to take from; this process's when None.
    """
    surroundings = os.environ if surroundings is None else surroundings
    keys = {name: value for name, value in surroundings.items() if name in _USERS}
    return (
        _allowed(surroundings)
        | keys
        | {OWNERS: json.dumps({component: dict(values) for component, values in owners.items()})}
    )


def worker_variables(owners: OwnerVariables) -> dict[str, str]:
    """What the owner's settings give to user code: what is said for everyone, but for keys that another component alone
    uses, and what is said for `environment` by name."""
    everyone = owners.get(ALL_COMPONENTS, {})
    return {name: value for name, value in everyone.items() if name not in _USERS} | dict(owners.get("environment", {}))


def secret_values(*variables: Mapping[str, str]) -> list[str]:
    """Values of variables that hold keys by their names: what is shown of a component's words must not hold them.

    Short ones are left out: they are settings (`MAX_TOKENS`), and hiding them would spoil every text.
    """
    return [
        value
        for given in variables
        for name, value in given.items()
        if len(value) >= _SHORTEST_SECRET and any(word in name.upper() for word in _SECRET_WORDS)
    ]


def decode_owner_variables(surroundings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What `for_keeper` packed, in the keeper."""
    return json.loads(surroundings.get(OWNERS, "{}"))


def component_variables(
    component: str,
    *,
    folder: Path,
    specification: Specification,
    attempt: int,
    secret: str,
    owners: OwnerVariables,
    surroundings: Mapping[str, str],
    gpus: Sequence[str] | None = None,
    checkpoint: Path | None = None,
) -> dict[str, str]:
    """The whole environment of one component, but for the descriptor of its reports.

    Args:
        component: Its name.
        folder: The run folder.
        specification: Gives threads, the seed of hashes, and whether a key is needed.
        attempt: Which life of the run this is.
        secret: The run's own, by which its members know each other.
        owners: See `for_keeper`.
        surroundings: The keeper's environment.
        gpus: Ids of the GPUs that the run has reserved, which is then all that it sees; None: nothing is reserved.
        checkpoint: What this attempt goes on from.
    """
    variables = _allowed(surroundings)
    keys = {name: value for name, value in surroundings.items() if name in _USERS}
    for name, value in (keys | dict(owners.get(ALL_COMPONENTS, {}))).items():
        if _is_for(name, component, specification):
            variables[name] = value
    threads = str(specification.config.launcher.threads)
    for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        variables[f"{library}_NUM_THREADS"] = threads
    variables |= {
        "PYTHONHASHSEED": str(specification.config.algorithm.seed),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    temporary = RunFolder(folder).temporary
    if temporary is not None:
        # What programs leave there when they are killed goes with the run.
        variables["TMPDIR"] = str(temporary)
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if checkpoint is not None:
        variables[crew.ENV_CHECKPOINT] = str(checkpoint)
    variables |= owners.get(component, {})
    return variables | {
        crew.ENV_FOLDER: str(folder),
        crew.ENV_COMPONENT: component,
        crew.ENV_ATTEMPT: str(attempt),
        crew.ENV_SECRET: secret,
    }
