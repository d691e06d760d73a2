"""Checks before a start, so that a run that must fail later is refused at once.

They need no loaded model; the run's own validation checks the rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toprope.errors import InvalidValue, NotPossibleNow
from toprope.extras import missing
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.settings.owner import Home, OwnerSettings
from toprope.settings.schema import Config
from toprope.settings.sections.hosted import KEY
from toprope.supervisor.environment_variables import hub_variables
from toprope.supervisor.launchers.by_kind import engine_of
from toprope.supervisor.launchers.cluster import request_for
from toprope.workbench.memory import fit_here, in_gb

_WANDB = "WANDB_API_KEY"
_HOST = "wandb"


def require_interpreters(specification: Specification) -> None:
    """Require that the interpreters of a run's environments and engine exist.

    Raises:
        InvalidValue: An interpreter was removed since the run was frozen.
    """
    # Questions are asked without the environment.
    for source in () if specification.ask is not None else (specification.environment, *specification.mixture):
        if source.interpreter is not None and not Path(source.interpreter).exists():
            raise InvalidValue(
                f"The interpreter of {source.name}, {source.interpreter}, does not exist any more.",
                hint=f"describe_environment shows the present state of {source.name}. Then make a new draft with "
                "select_environment, or ask the owner to add it again (toprope env add).",
            )

    engine = specification.config.inference.engine
    if specification.engine_python is not None and not Path(specification.engine_python).exists():
        raise InvalidValue(
            f"The interpreter of {engine}, {specification.engine_python}, does not exist any more.",
            hint=f"The owner installs it again (toprope engine add {engine}), or edit_config sets inference.engine to "
            "embedded.",
        )


def lacks_whole_model(config: Config) -> bool:
    """Return True if the policy's folder has adapters alone, and the engine begins with a whole model."""
    return config.inference.engine == "vllm" and (Path(config.policy.model) / "adapter_config.json").is_file()


def require_whole_model(config: Config) -> None:
    """Require a policy that the engine can begin with.

    Args:
        config: Names the policy by its folder if another run left it.

    Raises:
        InvalidValue: See `lacks_whole_model`.
    """
    if lacks_whole_model(config):
        raise InvalidValue(
            f"{config.policy.model} has adapters without the model below them, and vLLM begins with a whole model. "
            "Nothing was started.",
            hint="Set inference.engine to embedded or transformers in a draft whose policy.model is that run "
            "(fork_config makes one). Or export the policy in form merged, and set policy.model to that folder.",
        )


def describe_job(specification: Specification, home: Home) -> str:
    """Say what a cluster's engine would be asked for; empty for a run on this machine. The engine is not asked.

    Raises:
        InvalidValue: The owner has no such cluster.
    """
    launcher = specification.config.launcher
    if launcher.kind == "local":
        return ""
    name, cluster = home.clusters().chosen(launcher)
    request = request_for(RunFolder(home.runs / specification.run_id), specification, cluster)
    described = engine_of(cluster).describe(request)
    if specification.run_kind.starts_runs:
        return f" Its runs would be jobs on the cluster {name}. Each asks from {described}."
    return f" It would run on the cluster {name}. Asked from {described}."


def require_memory(specification: Specification, settings: OwnerSettings) -> None:
    """Require that this machine can hold the weights of a policy that is to be trained.

    The rest of the estimate refuses nothing, nor does a number of parameters that nobody counted.

    Raises:
        NotPossibleNow: The weights of one process alone exceed all memory.
    """
    config = specification.config
    if not specification.run_kind.trains or config.is_hosted or config.launcher.kind != "local":
        return
    fit = fit_here(config, hub_variables(settings.variables), allowed=settings.machine.gpus)
    if isinstance(fit, str) or not fit.counted or fit.installed is None or fit.weights <= fit.installed:
        return
    place = "this machine's RAM and swap have" if fit.gpus == 0 else "a GPU of this machine has"
    raise NotPossibleNow(
        f"The weights of {config.policy.model} alone take {in_gb(fit.weights)}, and {place} "
        f"{in_gb(fit.installed)} in all. Nothing was started.",
        hint=" ".join([*fit.mended, "Or set policy.model to a smaller one (edit_config)."]),
    )


def missing_keys(specification: Specification, settings: OwnerSettings, settings_file: Path) -> list[InvalidValue]:
    """Return what to say of each key that a run needs and that the owner's settings lack; empty if none does."""
    problems = []
    kind, wandb = specification.run_kind, specification.config.logging.wandb
    if (kind.trains or kind.starts_runs) and wandb == "online" and not _has_wandb(settings):
        problems.append(
            InvalidValue(
                f"logging.wandb is online, and there is no {_WANDB}. Nothing was started.",
                hint="edit_config sets logging.wandb to offline, which writes the same files without a key (unless it "
                f"is locked). Or the owner puts the key into {settings_file}: "
                f"variables: {{tracker: {{{_WANDB}: <the key>}}}}.",
            )
        )
    has_key = any(settings.variables.get(recipient, {}).get(KEY) for recipient in ("*", "trainer"))
    if specification.config.is_hosted and not has_key:
        problems.append(
            InvalidValue(
                f"trainer.backend is tinker, and the owner's settings name no {KEY}. Nothing was started.",
                hint=f"The owner puts the key into {settings_file}: variables: {{trainer: {{{KEY}: <the key>}}}}.",
            )
        )
    return problems


def require_trackers(config: Config) -> None:
    """Require the packages of the trackers that a configuration names.

    Raises:
        InvalidValue: One is not installed.
    """
    for name, module in (("tensorboard", "tensorboardX"), ("trackio", "trackio")):
        if name in config.logging.trackers and missing([module]):
            raise InvalidValue(
                f"logging.trackers names {name}, and the package {module} is not installed. Nothing was started.",
                hint=f"The owner installs it ({sys.executable} -m pip install {module}), or edit_config removes it.",
            )


def _has_wandb(settings: OwnerSettings) -> bool:
    """Return True if the owner gave a key for Weights & Biases, or `wandb login` has stored one for this user."""
    keys = (settings.variables.get(recipient, {}).get(_WANDB) for recipient in ("*", "tracker", "trainer"))
    if any(keys) or os.environ.get(_WANDB):
        return True
    try:
        return _HOST in Path(os.environ.get("HOME", "/"), ".netrc").read_text(errors="replace")
    except OSError:
        return False
