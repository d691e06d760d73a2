"""The client of a service that trains and samples: the package `tinker`, 0.24 or later, whichever is installed.

The client repeats what is safe to repeat: every request has a number, and a service that has seen it answers again.
What it gives up becomes an error in words here: `PeerAway` if a restart from the last saved state can help, because the
service or the session is gone, else an error that ends the run.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from toprope.errors import ComponentFailed, InvalidValue, NotFound, TopropeError
from toprope.settings.sections.hosted import ADDRESS, KEY
from toprope.training.component.peer_addresses import PeerAway
from toprope.untrusted import marked

T = TypeVar("T")

KEPT_S = 86_400
"""Seconds for which the service keeps the weights of a step; those of checkpoints it keeps until they are deleted."""
_BEAT_S = 1.0
_SILENT_S = 60.0
"""The longest silence of a server that sends a file."""
_WARN_EVERY_S = 60.0
_PATIENCE_S = 60.0
"""Seconds after which a call that the client repeats is worth a warning."""
_SHOWN = 300
"""Characters shown of what a service says."""
_FIX_KEY = (
    f"The owner puts a valid key into settings.yaml: variables: {{trainer: {{{KEY}: ...}}}}. Then resume_training."
)
_GONE = ("not loaded", "session", "expired", "broken", "poisoned")
"""Words of refusals that mean: the service does not know this model or session any more."""


class Service:
    """One session with a service. Create it with `connect`.

    Args:
        options: Arguments of every client: key and address.
        beat: Called about once a second while an answer is awaited.
        warn: Called with a sentence for people who follow the run.
    """

    def __init__(
        self, options: Mapping[str, Any], service_name: str, beat: Callable[[], None], warn: Callable[[str], object]
    ) -> None:
        import tinker

        self._options, self._service_name, self._beat = dict(options), service_name, beat
        self._warn = warn
        self._tinker: Any = tinker
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="service")
        self.version = metadata.version("tinker")
        """The version of the client."""
        with _in_words("take these settings", service_name):
            self._client: Any = tinker.ServiceClient(**self._options)
        self.wait("open a session", lambda: self._client.holder)

    @classmethod
    def connect(cls, beat: Callable[[], None] = lambda: None, warn: Callable[[str], object] = print) -> Service:
        """Connect with the address and the key in this process's variables, which it takes out of them.

        Args:
            beat: Called about once a second while an answer is awaited.
            warn: Called with what the client says about rate limits and capacity, at most once a minute.

        Raises:
            InvalidValue: There is no key, or the client is not installed.
            TopropeError: The service refuses the key or cannot be reached.
        """
        key, url = os.environ.pop(KEY, ""), os.environ.get(ADDRESS) or None
        if not key:
            raise InvalidValue(f"trainer.backend is tinker, and there is no {KEY}.", hint=_FIX_KEY)
        _hide_torch()
        # The client would send its errors, with their texts, to the service.
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        try:
            import_module("tinker")
        except ImportError as error:
            raise InvalidValue(
                f"trainer.backend is tinker, and its client cannot be imported: {error}.",
                hint=f"The owner installs it: {sys.executable} -m pip install 'toprope[tinker]'",
            ) from None
        log = logging.getLogger("tinker")
        log.addHandler(_Forward(warn))
        log.propagate = False
        service_name = urlsplit(url).netloc if url else "the Tinker service"
        return cls({"api_key": key} | ({"base_url": url} if url else {}), service_name, beat, warn)

    def wait(self, doing: str, call: Callable[[], T]) -> T:
        """Run a call that blocks until the service has answered; return its value.

        Args:
            doing: What the service was to do, for errors: `train a step`.

        Raises:
            TopropeError: It failed; see the module.
        """
        running, late = self._pool.submit(call), time.monotonic() + _PATIENCE_S
        while True:
            with _in_words(doing, self._service_name):
                try:
                    return running.result(_BEAT_S)
                except NotYet:  # of this wait, or of the call, which has ended then
                    if running.done() and isinstance(error := running.exception(), NotYet):
                        raise explain(error, doing, self._service_name) from None
            self._beat()
            if time.monotonic() > late:
                late = float("inf")
                self._warn(
                    f"{self._service_name} was asked to {doing} {_PATIENCE_S:.0f} s ago; its client goes on trying."
                )

    def create(self, model: str, rank: int, seed: int) -> Any:
        """A training client of new adapters.

        Raises:
            NotFound: The service does not have the model.
        """
        try:
            return self._make_client(
                "create adapters", lambda: self._client.create_lora_training_client(model, rank, seed)
            )
        except (InvalidValue, NotFound) as error:
            offered = self._models()
            if not offered or model in offered:
                raise
            raise NotFound(
                f"{self._service_name} has no model {model}.",
                hint=f"Set policy.model to one of its models: {', '.join(offered[:30])}.",
            ) from error

    def restore(self, state: str, *, optimizer: bool) -> Any:
        """A training client that begins with a saved state.

        Args:
            state: A `tinker://` path of `save_state`.
            optimizer: Also restore the optimizer's state.
        """
        client = self._client
        make = client.create_training_client_from_state
        if optimizer:
            make = client.create_training_client_from_state_with_optimizer
        return self._make_client(f"load {state}", lambda: make(state))

    def sampler(self, path: str | None, model: str) -> Any:
        """A sampling client of saved weights, or of the model itself if `path` is None."""
        source: dict[str, Any] = {"base_model": model} if path is None else {"model_path": path}
        return self._make_client(f"sample from {path or model}", lambda: self._client.create_sampling_client(**source))

    def delete(self, path: str) -> None:
        """Delete a saved state; what cannot be deleted stays."""
        with suppress(TopropeError):
            self.wait(
                "delete a state", lambda: self._make_rest_client().delete_checkpoint_from_tinker_path(path).result()
            )

    def download(self, training: Any, sampler: str, name: str, folder: Path) -> list[Path]:
        """Download adapters in the form of Hugging Face into a folder; return its new files.

        Args:
            training: The training client, which newer services ask for a copy in that form.
            sampler: The `tinker://` path of saved sampler weights.
            name: For the copy.
        """
        rest_client = self._make_rest_client()
        if hasattr(training, "save_weights_external"):
            weights = self.wait("export adapters", lambda: training.save_weights_external(name, KEPT_S).result())
            urls = self.wait(
                "name the files", lambda: rest_client.get_external_weights_urls(weights.path).result()
            ).urls
        else:
            # The client's own parser refuses the paths of open servers, which do not name the kind of weights.
            run, _, weights_name = sampler.removeprefix("tinker://").partition("/")
            archive = rest_client.get_checkpoint_archive_url
            urls = {"adapter.tar.gz": self.wait("name the archive", lambda: archive(run, weights_name).result()).url}
        return [self.wait(f"send {file}", lambda file=file: _download_file(urls[file], folder, file)) for file in urls]  # type: ignore[misc]

    def _make_client(self, doing: str, make: Callable[[], Any]) -> Any:
        """A client of the service; newer versions return a future of it."""

        def make_client() -> Any:
            client = make()
            return client.result() if hasattr(client, "result") else client

        return self.wait(doing, make_client)

    def _make_rest_client(self) -> Any:
        """The client of stored weights and capabilities, which older versions make from the session."""
        rest_class = getattr(self._tinker, "RestClient", None)
        if rest_class is not None and hasattr(rest_class, "get_server_capabilities"):
            return rest_class(**self._options)
        return self._client.create_rest_client()

    def _models(self) -> list[str]:
        """The names of the service's models; empty if it does not tell."""
        rest_client = self._make_rest_client()
        with suppress(TopropeError):
            if hasattr(rest_client, "get_server_capabilities"):
                capabilities = self.wait("list its models", lambda: rest_client.get_server_capabilities().result())
            else:
                capabilities = self.wait("list its models", self._client.get_server_capabilities)
            return [str(model.model_name) for model in capabilities.supported_models]
        return []


def _hide_torch() -> None:
    """Have imports of torch fail in this process: the client and transformers would load it and need nothing of it."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say so at every import


class _Forward(logging.Handler):
    """Passes warnings of the client on, at most one in a minute."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._warn, self._last = warn, float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        if (now := time.monotonic()) - self._last >= _WARN_EVERY_S:
            self._last = now
            self._warn(f"The service's client says: {marked(record.getMessage(), _SHOWN)}")


@contextmanager
def _in_words(doing: str, service_name: str) -> Iterator[None]:
    try:
        yield
    except (TopropeError, NotYet):
        raise
    except Exception as error:  # the client raises errors of several libraries
        raise explain(error, doing, service_name) from error


def explain(error: BaseException, doing: str, service_name: str) -> TopropeError:
    """The error of a service in words, as one that a restart may help, or not.

    Args:
        error: Of the client; its causes are looked at too.
        doing: What the service was to do.
        service_name: Its name.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < 5:
        chain.append(cause)
    status = next((int(code) for link in chain if (code := getattr(link, "status_code", None))), 0)
    text = marked(error, _SHOWN)
    names = {type(link).__name__ for link in chain}
    category = str(getattr(error, "category", "")).lower()
    failure = f"{service_name} did not {doing}"
    if status in (401, 403):
        return ComponentFailed(f"{failure}: it refuses the key {KEY} ({status}): {text}", hint=_FIX_KEY)
    if status == 402:
        return ComponentFailed(
            f"{failure}: the account cannot pay: {text}", hint="The owner settles it with the service."
        )
    if status == 429:
        return PeerAway(
            f"{failure}: its rate limit holds for minutes: {text}", hint="A lower rollout.concurrency asks less."
        )
    if status in (404, 410) or "RetryableException" in names or any(word in str(error).lower() for word in _GONE):
        return PeerAway(f"{failure}: it does not know this session or model any more: {text}")
    if 400 <= status < 500 or category == "user" or isinstance(error, ValueError | TypeError | AssertionError):
        return InvalidValue(f"{failure}: it refuses the request: {text}", hint="read_logs shows the whole answer.")
    return PeerAway(f"{failure}: it does not answer, or failed ({type(error).__name__}): {text}")


def _download_file(url: str, folder: Path, name: str) -> Path:
    target = (folder / name).resolve()
    if not target.is_relative_to(folder.resolve()) or urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{name!r} is not the name of a file to download")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        urllib.request.urlopen(url, timeout=_SILENT_S) as answer,
        tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as aside,
    ):
        try:
            while block := answer.read(1 << 20):
                aside.write(block)
            if answer.length:  # urllib does not tell of a connection that was closed too early
                raise ConnectionError(f"{name} broke off {answer.length} bytes before its end")
            aside.flush()
        except BaseException:
            os.unlink(aside.name)
            raise
    os.replace(aside.name, target)
    return target


def datum(ids: list[int], **per_token: list[float]) -> Any:
    """One sequence for the service.

    Args:
        ids: Token ids, at least two.
        per_token: Inputs of the loss, one value for each of `ids`; that of the first is left out, since nothing
            predicts it.
    """
    import tinker

    inputs: Mapping[str, Any] = {
        "target_tokens": tinker.TensorData(data=ids[1:], dtype="int64", shape=[len(ids) - 1]),
        **{
            name: tinker.TensorData(data=values[1:], dtype="float32", shape=[len(ids) - 1])
            for name, values in per_token.items()
        },
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=dict(inputs))
