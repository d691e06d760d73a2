"""Runs whose policy is trained and sampled at a service: the model there, its prices, and weights of earlier runs."""

from __future__ import annotations

from pathlib import Path

from toprope.errors import Corrupt, InvalidValue, NotFound
from toprope.records.run.specification import Specification
from toprope.settings.owner import OwnerSettings
from toprope.training.hosted.policy import FILE, HostedPolicy


def with_service(specification: Specification, settings: OwnerSettings) -> Specification:
    """Add the owner's prices of the model that a service trains; leave other runs as they are.

    Raises:
        InvalidValue: The run begins with weights that are elsewhere: at a service, or on this machine.
    """
    config = specification.config
    folder = Path(config.policy.model).expanduser()
    at_service = (folder / FILE).is_file()
    if not config.is_hosted:
        if at_service:
            raise InvalidValue(
                f"The weights of {specification.base_run or folder} are at a service: trainer.backend local cannot "
                "load them.",
                hint="Set trainer.backend to tinker, or policy.model to a model on this machine or the Hub.",
            )
        return specification
    if at_service:
        try:
            model = HostedPolicy.read(folder).base_model
        except (NotFound, Corrupt) as error:
            raise InvalidValue(f"policy.model: {error}") from None
    elif specification.base_run is not None:
        raise InvalidValue(
            f"{specification.base_run} was trained on this machine: a service cannot begin with its weights.",
            hint="Set policy.model to a model of the service, or trainer.backend to local.",
        )
    else:
        model = config.policy.model
    return specification.model_copy(update={"hosted": settings.tinker.prices.get(model)})
