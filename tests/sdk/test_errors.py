"""Failures of environments name the hosts that they could not reach."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from toprope.sdk import errors
from toprope.sdk.errors import (
    EnvironmentMistake,
    Failure,
    InvalidRequest,
    LoadError,
    no_hosts_noted,
    note_unreachable_hosts,
    with_unresolved,
)


def chain(*errors: Exception) -> Exception:
    for later, earlier in zip(errors, errors[1:], strict=False):
        later.__cause__ = earlier
    return errors[0]


@pytest.mark.parametrize(
    ("error", "host"),
    [
        (chain(RuntimeError("no rows"), OSError("HTTPSConnectionPool(host='data.example.org', port=443): "
               "Max retries exceeded"), ConnectionError("refused")), "data.example.org"),
        (OSError("We couldn't connect to 'https://models.example.org' to load the files"), "models.example.org"),
        (ConnectionError("Couldn't reach 'someone/rows' on the Hub (LocalEntryNotFoundError)"), "huggingface.co"),
        (OSError("Cannot find the files, and outgoing traffic has been disabled"), "huggingface.co"),
        (OSError("Cannot reach https://hub.example.org/x: offline mode is enabled"), "hub.example.org"),
        (ConnectionError("Cannot connect to host api.example.org:443 ssl:default"), "api.example.org"),
        (RuntimeError("Failed to clone: fatal: Could not resolve host: git.example.org\n"), "git.example.org"),
    ],
)  # fmt: skip
def test_a_host_that_could_not_be_reached_is_named(error: Exception, host: str, monkeypatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert Failure.of(error).message.endswith(f"; {host} could not be reached")


def test_group_of_exceptions_is_told_by_its_first_one() -> None:
    first = ConnectionError("Cannot connect to host api.example.org:443 ssl:default")
    told = Failure.of(ExceptionGroup("unhandled errors", [ExceptionGroup("more", [first]), OSError("second")]))
    assert told.type == "ConnectionError" and told.message.endswith("; api.example.org could not be reached")
    assert "OSError: second" in told.traceback


def test_place_of_an_error_is_no_file_of_python_s_library() -> None:
    with pytest.raises(ValueError) as told:
        json.loads("x")
    assert "test_errors.py:" in Failure.of(told.value).where
    assert told.value.__traceback__ is not None
    told.value.__traceback__ = told.value.__traceback__.tb_next  # the rest are frames of json
    assert Failure.of(told.value).where == ""


@pytest.mark.parametrize("error", [ValueError("see https://docs.example.org/x"), ConnectionError("refused")])
def test_no_host_is_made_up(error: Exception) -> None:
    assert Failure.of(error).message == str(error)


def test_hub_is_named_as_the_reason_of_a_missing_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)
    for unreached, told in (
        (["data.example.org"], "; besides, data.example.org could not be reached"),
        (["huggingface.co", "data.example.org"], "; huggingface.co could not be reached"),
    ):
        monkeypatch.setattr(errors, "_unreached", unreached)
        for error in (
            ValueError("No datasets could be loaded successfully"),
            EnvironmentMistake("It gave None, as environments do whose data are missing"),
        ):
            assert Failure.of(error).message == f"{error}{told}"
    assert "besides, " in Failure.of(LookupError("Resource words not found")).message, "it may be on any host"


@pytest.mark.parametrize(
    "line", ["pytest.no_such_name", "from pytest import no_such_name", "import pytest.no_such_name"]
)
def test_installed_version_is_named_that_lacks_an_imported_name(line: str) -> None:
    with pytest.raises((ImportError, AttributeError)) as told:
        exec(line, {"pytest": pytest})
    lacks = f"; the installed pytest {pytest.__version__} lacks it"
    assert Failure.of(told.value).message.endswith(lacks)
    assert Failure.of(chain(RuntimeError("It needs games."), told.value)).message.endswith(f"{lacks})")


def test_own_mistake_of_a_package_names_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    errors._distributions.cache_clear()
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: reads.append(1) or {"pytest": ["pytest"]})
    for inside, named in (("pytest.sub", False), ("my_env", True)):
        with pytest.raises(AttributeError) as told:
            exec("pytest.no_such_name", {"pytest": pytest, "__name__": inside})
        assert ("lacks it" in Failure.of(told.value).message) is named
    lacking = "def __getattr__(name):\n raise AttributeError(f'module {__name__!r} has no attribute {name!r}')"
    answering = {"__name__": "pytest"}
    exec(lacking, answering)
    with pytest.raises(AttributeError) as told:
        exec("get('no_such_name')", {"get": answering["__getattr__"], "__name__": "my_env"})
    assert "lacks it" in Failure.of(told.value).message, "the package only answers for its module"
    assert reads == [1], "the list of packages is read once"
    errors._distributions.cache_clear()


def test_no_version_is_named_if_the_name_is_no_installed_package_s() -> None:
    for line in ("import no_such_package.games", "None.no_such_name", "import tests_of_nobody"):
        with pytest.raises((ImportError, AttributeError)) as told:
            exec(line, {})
        assert Failure.of(told.value).message == str(told.value)


def test_replaced_exception_is_named_unless_its_text_is_repeated() -> None:
    def told(error: Exception, cause: Exception) -> str:
        try:
            raise error from cause
        except Exception as raised:
            return Failure.of(raised).message

    reason = OSError("read-only: /data")
    assert (
        told(RuntimeError("It needs the toolkit."), reason) == "It needs the toolkit (from OSError: read-only: /data)"
    )
    assert told(RuntimeError(f"It failed: {reason}"), reason) == f"It failed: {reason}"
    assert told(LoadError("It does not load. Install it."), reason) == "It does not load. Install it."


def test_a_library_that_goes_on_without_its_data_is_told_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(host: object, *given: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(errors, "_unreached", [])
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)
    note_unreachable_hosts()
    missing = LookupError("Resource words not found. See https://help.example.org.")
    assert Failure.of(missing).message == str(missing)
    with pytest.raises(OSError):
        socket.create_connection(("data.example.org", 443))
    with pytest.raises(OSError):
        socket.create_connection(("later.example.org", 443))
    for one, host in ((missing, "later"), (OSError("Unable to find 'https://data.example.org/rows.json'"), "data")):
        assert Failure.of(one).message.endswith(f"{host}.example.org could not be reached")
    assert Failure.of(missing).message.endswith("; besides, later.example.org could not be reached")
    answered = OSError("Unable to find 'https://docs.example.org/rows.json'")
    assert Failure.of(answered).message == str(answered), "its host was not among them"
    assert Failure.of(ValueError("3 is not a colour")).message == "3 is not a colour"
    with no_hosts_noted(), pytest.raises(OSError):
        socket.create_connection(("replaced.example.org", 443))
    for lacking in (
        EnvironmentMistake("It gave None, as environments do whose data are missing"),
        InvalidRequest("The train split has no tasks: its data are missing, or its knobs leave none."),
        ValueError("No training items available. Its setup may have failed"),
        RuntimeError("the dataset is empty"),
    ):
        assert Failure.of(lacking).message.endswith("; besides, later.example.org could not be reached")
    for own in (LoadError("/data/mine.csv holds no rows."), LoadError("No file 'x' (not found)."), ValueError("")):
        assert Failure.of(own).message == str(own)


@pytest.mark.parametrize("reached", [True, False])
def test_data_that_nltk_could_not_download_are_told_by_its_host(reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host = "raw.githubusercontent.com"
    monkeypatch.setattr(errors, "_unreached", [*([] if reached else [host]), "other.example.org"])
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)
    asked = LookupError("Resource 'words' not found. Please use >>> nltk.download('words') See https://www.nltk.org")
    assert Failure.of(asked).message.endswith(f"; {host} could not be reached") is not reached


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [(None, "huggingface.co"), ("", "huggingface.co"), ("https://hub.example.org:8080/mirror/", "hub.example.org")],
)
def test_hub_that_is_switched_off_counts_as_unreached(
    endpoint: str | None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_unreached", [])
    if endpoint is None:
        monkeypatch.delenv("HF_ENDPOINT", raising=False)
    else:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
    for offline in (False, True):
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", SimpleNamespace(HF_HUB_OFFLINE=offline))
        told = Failure.of(LookupError("The words are missing")).message
        assert told == "The words are missing" + f"; besides, {host} could not be reached" * offline
        assert Failure.of(ConnectionError("refused")).message == "refused"


@pytest.mark.parametrize(("code", "offline"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)])
def test_hub_that_does_not_exist_here_is_not_asked_again(
    code: int, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unresolved(host: object, *given: object) -> None:
        raise socket.gaierror(code, "no name")

    constants = SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(errors, "_unreached", [])
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)  # another test may have loaded it
    note_unreachable_hosts()
    for host in ("huggingface.co", "data.example.org"):  # without its library
        with pytest.raises(OSError):
            socket.create_connection((host, 443))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    for host, expected in (("data.example.org", False), ("huggingface.co", offline)):
        with pytest.raises(OSError):
            socket.create_connection((host, 443))
        assert constants.HF_HUB_OFFLINE is expected
    monkeypatch.setattr(errors, "_HUB_AGAIN_S", 0.01)
    constants.HF_HUB_OFFLINE = False
    with pytest.raises(OSError):
        socket.create_connection(("huggingface.co", 443))
    limit = time.monotonic() + 30.0
    while constants.HF_HUB_OFFLINE:
        assert time.monotonic() < limit, "the Hub stays switched off"


def test_host_of_a_command_that_cannot_reach_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(said: str | bytes) -> str:
        failed = subprocess.CalledProcessError(128, ["git", "clone", "https://a.invalid/x"], stderr=said)
        try:
            raise LookupError("no tasks") from failed
        except LookupError as error:
            return Failure.of(error).message

    def looked_up(*given: object) -> None:
        pytest.fail("a host of an untrusted text was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    far = "fatal: unable to access 'https://a.invalid/x/': Could not resolve host: a.invalid\n"
    assert told(far) == told(far.encode()) == "no tasks; a.invalid could not be reached"
    for said in ("fatal: repository 'https://a.invalid/x/' not found", ""):
        assert "could not be reached" not in told(said)
    assert with_unresolved("exit status 1.", far) == "exit status 1; a.invalid could not be reached"
    assert with_unresolved("b.invalid could not be reached", far) == "b.invalid could not be reached"
