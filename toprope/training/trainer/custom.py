"""The trainer's program for `custom`: a class of the owner's own, in this process, with everything around it as usual.

The class is user code: it is loaded here and nowhere else, from a file that was named and hashed when the run was
frozen. What it is given is a `Session`: paths, batches, where to put weights and numbers. Metrics, checkpoints at the
usual steps, a stop, a full disk and a resume are those of every run.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toprope.errors import Corrupt, InvalidValue, TopropeError
from toprope.records.messages import Evaluated, Finished, Ready, Warned
from toprope.records.run.folder import read_json
from toprope.records.run.lines import NO_ROOM
from toprope.sdk.authoring.loading import attribute_of
from toprope.sdk.errors import Failure, LoadError
from toprope.sdk.training import Batch, CheckFailed, Data, Sample, Session, TrainConfig, Trainer
from toprope.settings.schema import Config
from toprope.training.component.member import CrewMember
from toprope.training.trainer.base import TrainingRun, all_finite

__all__ = ["OWN", "CustomRun", "settings_of"]

OWN = "own"
"""Label of what the trainer itself says it reached."""

_LOOK = "read_logs(component='trainer') has what it printed."


def settings_of(config: Config, device: str) -> TrainConfig:
    """The run's configuration as a trainer reads it; its own settings may name `epochs`."""
    rollout, own = config.rollout, dict(config.algorithm.trainer_settings)
    return TrainConfig(
        epochs=int(own.pop("epochs", 1)),
        batch_size=rollout.group_size * rollout.groups_per_step,
        learning_rate=config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        eval_every=config.evaluation.every_steps,
        steps=config.budget.steps,
        seed=config.algorithm.seed,
        device=device,
        threads=config.launcher.threads,
        max_grad_norm=config.optimizer.max_grad_norm,
        temperature=rollout.temperature,
        settings=own,
    )


class CustomRun(TrainingRun):
    """One attempt of training by a class of the owner's own."""

    def __init__(self, member: CrewMember) -> None:
        super().__init__(member)
        # The class has its own optimizer, which is nobody else's affair.
        self._optimizer = SimpleNamespace(state={})
        self._numbers: dict[str, float] = {}
        self._pending = self._behind = False

    def run(self, checkpoint: Path | None = None) -> None:
        """Loads the class, lets it check, train, save and evaluate.

        Raises:
            TopropeError: It does not load, a check found something, or it raised.
        """
        import torch

        torch.set_num_threads(self._config.launcher.threads)
        from toprope.training.api.clients.sync_client import SyncApiClient
        from toprope.training.policy.loading import describe_device
        from toprope.training.policy.weight_sync import WeightFile
        from toprope.training.trainer.batch_source import BatchSource
        from toprope.training.trainer.checkpoint_io import CheckpointState

        member, config = self._member, self._config
        self._trainer = self._made(settings_of(config, describe_device(config)))
        policy, data = Path(member.address("policy")), _data(Path(member.address("environment")))
        self._publisher = _Handed(member.folder.crew, WeightFile, -1 if member.life else 0)
        session = _RunSession(self, policy, data)
        with self._near():
            self._trainer.validate(session)
        member.address("api")
        self._api = SyncApiClient(self._where_api_is, member.secret)
        self._api.waits = lambda: not member.ending.is_set()
        state = CheckpointState(0, 0, 0, 0.0)
        if checkpoint is not None:
            session.resumed = self._sound(checkpoint)
            state = self._counted(session.resumed)
            self._publisher.version = state.policy_version - 1
        # Inference has the starting policy, or what an earlier life published.
        self._behind = member.life > 0 or checkpoint is not None
        session.step = state.step
        self._source = BatchSource(self._api, config, self._is_ending, state.cursor, state.rollouts, state.dropped)
        member.report(Ready("checked"))  # the driver waits for it: nothing is sampled before the checks have passed
        with self._near():
            found = self._trainer.live(session, trained=self._save_at_last)
        metrics = {name: value for name, value in asdict(found).items() if value is not None}
        if metrics:
            member.report(Evaluated(OWN, metrics))
        member.report(Finished({"step": self._step, "train_seconds": round(self._elapsed(), 3), "metrics": metrics}))

    def batches(self, session: Session) -> Iterator[Batch]:
        """Batches until the budget is used or the run is to end."""
        from toprope.training.trainer.batch_source import Ending, rows_of

        if self._behind:
            raise TopropeError(
                "The trainer asked for batches before it had published the weights that it goes on from.",
                hint="Call session.publish(model) in train() before the first batch where session.resumed is set.",
            )
        while self._step < self._config.budget.steps and not self.after_step():
            try:
                batch = self._next_batch()
            except Ending:
                return
            self._numbers, self._pending = batch.metrics, True
            rows = rows_of(batch.groups, self._config)
            yield Batch(
                self._step + 1,
                [
                    Sample(
                        row.prompt,
                        row.completion,
                        row.trained,
                        row.logprobs,
                        row.reward,
                        row.advantage,
                        row.rollout,
                        row.truncated,
                        row.version,
                    )
                    for row in rows
                ],
            )
            if self._pending:
                raise TopropeError(
                    f"The trainer asked for the next batch and had not logged step {self._step + 1}.",
                    hint="Call session.log({'loss': ...}) once after each batch; it ends the step.",
                )

    def logged(self, session: Session, numbers: Mapping[str, float]) -> None:
        """The end of a step."""
        if not self._pending:
            raise TopropeError(
                "session.log was called without a batch before it.", hint="Call it once for each batch of the session."
            )
        self._pending, session.step = False, self._step + 1
        told = {name: _number(name, value) for name, value in numbers.items()}
        self._on_row(session.step, {"loss": 0.0} | told | self._numbers)

    def publish(self, weights: Any) -> int:
        """The next version of the weights."""
        named = weights.named_parameters() if hasattr(weights, "named_parameters") else dict(weights).items()
        version = self._publisher.take(dict(named))
        self._behind = False
        return version

    def save_now(self) -> None:
        """A checkpoint of the step that is done."""
        self._save()

    def _save(self) -> bool:
        return True if self._step == 0 else super()._save()  # before its first step it may have nothing to save

    def _made(self, config: TrainConfig) -> Trainer:
        source = self._member.spec.trainer
        file = Path(source.file)
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != source.sha256:
            self._member.report(Warned(f"{file.name} has changed since this run was frozen; it is used as it is now."))
        with self._near():
            found = attribute_of(file, source.attribute)
            if not (isinstance(found, type) and issubclass(found, Trainer)):
                raise InvalidValue(
                    f"{source.attribute} of {file.name} is no class that derives from toprope.sdk.training.Trainer.",
                    hint="Derive it from Trainer, with train, evaluate and save.",
                )
            return found(config)

    def _near(self) -> Any:
        return _Raised(Path(self._member.spec.trainer.file))

    def _counted(self, checkpoint: Path) -> Any:
        """What a checkpoint says of steps and groups; the trainer itself takes up the rest."""
        from toprope.training.trainer.checkpoint_io import CheckpointState

        try:
            document = json.loads((checkpoint / "state.json").read_text())
            state = CheckpointState(**{name: document[name] for name in CheckpointState.__dataclass_fields__})
        except (OSError, ValueError, KeyError) as error:
            raise Corrupt(f"The checkpoint {checkpoint} cannot be used: {error!r}.") from error
        self._step = self._saved_step = state.step
        self._earlier_s = state.train_seconds
        cursor = self._api.take_up(state.cursor)
        return CheckpointState(**{**asdict(state), "cursor": cursor})

    def _unsound(self, loss: float | None) -> str | None:
        if loss is None or not math.isfinite(loss):
            return "The loss"
        return None if all_finite(self._publisher.tensors) else "A published weight"

    def _write(self, state: Any) -> Path:
        from toprope.training.trainer.checkpoint_io import keep_checkpoint

        def write(aside: Path) -> None:
            aside.mkdir(mode=0o700)
            with self._near():
                self._trainer.save(aside)
            model = aside / "model"
            if not (model / "config.json").is_file() or not any(model.glob("*.safetensors")):
                raise TopropeError(
                    f"{type(self._trainer).__name__}.save() left no model in {model.name}/: a configuration, and "
                    "weights as safetensors.",
                    hint='model.save_pretrained(folder / "model") and tokenizer.save_pretrained(folder / "model").',
                )
            if not (model / "tokenizer_config.json").is_file():
                for file in Path(self._member.address("policy")).glob("*token*"):
                    shutil.copy(file, model / file.name)
            (aside / "state.json").write_text(json.dumps(asdict(state)))

        folder, keep = self._member.folder.checkpoints, self._config.logging.save_total_limit
        return keep_checkpoint(folder, state.step, write, keep)


class _RunSession(Session):
    """The run's side of `Session`. The class that it is handed to gets no more of the run than this."""

    def __init__(self, run: CustomRun, policy: Path, data: Data) -> None:
        self._run, self.policy, self.data = run, policy, data
        self.resumed, self.step = None, 0

    def batches(self) -> Iterator[Batch]:
        return self._run.batches(self)

    def publish(self, weights: Any) -> int:
        return self._run.publish(weights)

    def log(self, numbers: Mapping[str, float]) -> None:
        self._run.logged(self, numbers)

    def checkpoint(self) -> None:
        self._run.save_now()


class _Handed:
    """Weights that were handed over, copied into a file of the usual form. `publish` is what the run calls after each
    step: the trainer has published itself, or had no reason to."""

    def __init__(self, folder: Path, make: Any, version: int) -> None:
        self._folder, self._make, self.version = folder, make, version
        self._kept: dict[str, Any] = {}
        self._file: Any = None

    @property
    def tensors(self) -> list[Any]:
        return list(self._kept.values())

    def publish(self) -> int:
        return self.version

    def take(self, given: dict[str, Any]) -> int:
        """Copies tensors by name; the first time fixes names, shapes and number formats."""
        import torch

        if not given or not all(torch.is_tensor(value) for value in given.values()):
            raise TopropeError("session.publish takes a module, or tensors by parameter name.")
        if self._file is None:
            self._kept = {name: value.detach().cpu().clone() for name, value in given.items()}
            self._file = self._make(self._folder, self._kept, self.version)
        if {name: value.shape for name, value in given.items()} != {n: v.shape for n, v in self._kept.items()}:
            raise TopropeError("session.publish got other names or shapes than the first time.")
        with torch.no_grad():
            for name, value in given.items():
                self._kept[name].copy_(value)
        self.version = self._file.publish()
        return self.version


class _Raised:
    """What user code raises, in one sentence with its place; our own errors pass."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None or isinstance(error, TopropeError | KeyboardInterrupt):
            return False
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return False  # a full disk is waited for
        if isinstance(error, CheckFailed):
            raise InvalidValue(f"Nothing was trained: {error}", hint="Each check says what it found.") from error
        if isinstance(error, LoadError):
            raise InvalidValue(str(error), hint=_LOOK) from error
        failure = Failure.of(error, str(self._file.parent))
        where = f" ({failure.where})" if failure.where else ""
        raise TopropeError(f"{self._file.name} raised {failure.type}: {failure.message}{where}.", hint=_LOOK) from error


def _data(file: Path) -> Data:
    """What the driver found of the environment."""
    found = read_json(file)
    return Data(**{name: found[name] for name in Data.__dataclass_fields__})


def _number(name: str, value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TopropeError(f"session.log got {value!r:.60} for {name!r}, which is no number.") from None
