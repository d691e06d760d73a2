"""`toprope env try` and `toprope env check`: sample a few tasks in the terminal; check an environment.

The environment runs in a worker, as in a run; this process serves the policy, or an endpoint of the owner's answers.
`solver` needs no policy: the environment's references or its `solve` answer.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from toprope.text_format import plural, printed_line
from toprope_server.cli.context import open_workshop, tell
from toprope_server.cli.runs.naming import complete_environment
from toprope_server.cli.wording import in_commands

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

    from toprope.records.worker_messages import Card
    from toprope.training.rollouts.sampled_group import SampledGroup
    from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
    from toprope.workbench.catalog.describe import WorkerOptions
    from toprope.workbench.entries import Entry

SOLVER = "solver"
_UNDECLARED = 1000.0
"""From here on a highest reward is the bound that an adapter sets for authors who name none."""
_LONGEST = 2000


def try_environment(
    name: Annotated[
        str,
        typer.Argument(
            help="An environment's name, or the path of its Python file.", autocompletion=complete_environment
        ),
    ],
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=1, max=100, help="Number of tasks.")] = 3,
    model: Annotated[
        str,
        typer.Option(
            help="embedded, a folder or Hub id of a model, a model of settings.yaml, or solver: the environment's own "
            "answers."
        ),
    ] = "embedded",
    knob: Annotated[
        list[str] | None, typer.Option("--knob", "-k", metavar="NAME=VALUE", help="One of its settings. Repeatable.")
    ] = None,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of one turn, in tokens.")] = 256,
) -> None:
    """Sample a few tasks and show prompts, answers, the parts of the reward, and errors. Keeps nothing.

    Exit status 1 if a rollout ended with an error.
    """
    if split not in ("train", "validation"):
        raise typer.BadParameter("--split is train or validation; held-out tasks are for the reports of runs.")
    with open_workshop() as workshop:
        bad = anyio.run(lambda: _sample(workshop, name, tasks, model, _knobs(knob or []), split, max_tokens))
    raise typer.Exit(1 if bad else 0)


async def _sample(
    workshop: Workshop, name: str, count: int, model: str, knobs: dict[str, Any], split: str, max_tokens: int
) -> int:
    """The number of rollouts that ended with an error."""
    from toprope_tools.planning.opening import options_of

    from toprope.errors import InvalidValue
    from toprope.sdk.errors import WorkerFailure
    from toprope.training.inference.client import PromptTooLong
    from toprope.workbench.catalog.describe import failed, require_usable
    from toprope.workbench.drafts import default_section

    entry = _find_entry(workshop, name)
    require_usable(entry)
    section = default_section(workshop.home, entry.name, workshop.home.locks())
    options = options_of(workshop, section, knobs=knobs)
    output = _Output()
    bad, opened = 0, False
    try:
        async with _worker(entry, options, output) as (link, card):
            workshop.opened.add(entry)
            opened = True
            typer.echo(_cut(f"{card.name}: {card.description}"))
            async with _sampler(workshop, link, card, options, model, max_tokens) as make:
                for index in range(count):
                    group = await make(split, index)
                    if group is None:
                        typer.echo(f"This split has only {index} task{'' if index == 1 else 's'}.")
                        break
                    bad += _show(group, index, card)
                    output.show()
    except WorkerFailure as failure:
        if not opened and not knobs:
            workshop.opened.forget(entry)
        output.show()
        raise failed(entry, failure, options.walls, f"`toprope env try {shlex.quote(name)} -k NAME=VALUE`") from failure
    except PromptTooLong as error:
        raise InvalidValue(
            f"A prompt is too long: {error.message}.",
            hint="Name a model with a longer context (--model), or solver for the environment's own answers.",
        ) from error
    return bad


@asynccontextmanager
async def _worker(
    entry: Entry, options: WorkerOptions, output: _Output
) -> AsyncIterator[tuple[EnvironmentWorker, Card]]:
    """A worker that has opened the environment, and its card."""
    from toprope.sdk.wall.scratch import Scratch
    from toprope.workbench.catalog.stray_processes import MARK, new_mark, sweep

    mark, folder = new_mark(), Scratch()  # some environments write into the current folder
    try:
        async with await options.start(entry, {MARK: mark}, folder.path, output) as link:
            yield link, await options.open(link, entry)
    finally:
        sweep(mark)
        folder.remove()


@asynccontextmanager
async def _sampler(
    workshop: Workshop, link: EnvironmentWorker, card: Card, options: WorkerOptions, model: str, max_tokens: int
) -> AsyncIterator[Any]:
    """A function that samples task number `index` of a split; None if there is no such task."""
    from toprope.sdk.errors import WorkerError
    from toprope.settings.schema import Config
    from toprope.training.inference.client import Sampling
    from toprope.training.rollouts.endpoint_client import EndpointClient
    from toprope.training.rollouts.env_managed_sampler import EnvManagedSampler
    from toprope.training.rollouts.group_sampler import GroupSampler, TaskRef
    from toprope.training.rollouts.workers.restarting_worker import RestartingWorker
    from toprope.workbench.endpoints import keys_for, known_models, require_keys, resolve_models

    config = Config()
    sampling = Sampling(config.rollout.temperature, config.rollout.top_p, max_tokens)

    async def has(split: str, index: int) -> bool:
        limit = options.call_timeout_s + options.load_timeout_s  # the first call makes the tasks
        return bool((await link.tasks(split, index, 1, timeout=limit)).tasks)

    async def sampled_by(policy: Any) -> Any:
        async def again() -> EnvironmentWorker:
            return link

        maker = (EnvManagedSampler if card.own_loop else GroupSampler)(
            await RestartingWorker.start(again, config.launcher.model_copy(update={"restarts": 0})),
            policy,
            multi_turn=card.max_turns > 1,
            call_timeout_s=options.call_timeout_s,
        )

        async def make(split: str, index: int) -> SampledGroup | None:
            return await maker.sample(TaskRef(split, index), 1, sampling) if await has(split, index) else None

        return make

    if model == SOLVER:

        async def solve(split: str, index: int) -> SampledGroup | None:
            return await _solved(link, split, index, options.call_timeout_s) if await has(split, index) else None

        if card.own_loop:
            raise WorkerError("invalid", "", "it runs its own loop, in which the solver cannot answer: name a model")
        yield solve
        return
    settings, presets = workshop.settings(), workshop.home.preset_folders
    if model in known_models(settings, presets):
        models = resolve_models([model], settings, presets)
        require_keys(models, settings, workshop.home.settings_file)
        endpoint = models[0].endpoint
        assert endpoint is not None  # a known model has one
        client = EndpointClient(endpoint, keys_for(models, settings).get(endpoint.key or ""), None)
        try:
            yield await sampled_by(client)
        finally:
            await client.close()
        return
    from toprope.training.policy.tiny_model import RECIPES
    from toprope.training.rollouts.preview_policy import serve_policy

    room = {"max_context": RECIPES[model].context} if model in RECIPES else {}  # nothing is trained, so it is free
    config.policy = config.policy.model_copy(update={"model": model, **room})
    progress = _ProgressLines()
    async with serve_policy(config, workshop.home.policies, progress.show) as served:
        yield await sampled_by(served)


async def _solved(link: EnvironmentWorker, split: str, index: int, limit_s: float) -> SampledGroup:
    """Sample a rollout with the environment's own answers."""
    from toprope.records.journal.groups import Outcome
    from toprope.training.rollouts.sampled_group import SampledGroup, excerpt

    task = await link.begin(split, index, 1, timeout=limit_s)
    [handle], messages = task.rollouts, list(task.messages)
    prompt_length, answer_text = len(messages), ""
    outcome: Outcome | None = None
    while outcome is None:
        answer = await link.solve(handle, timeout=limit_s)
        if answer is None:
            await link.discard([handle], timeout=limit_s)
            outcome = Outcome(0.0, error="the task has no reference and the environment no solve()")
            break
        answer_text = answer
        [moved] = await link.advance([[handle, answer_text, False]], timeout=limit_s)
        messages += [{"role": "assistant", "content": answer_text}, *moved.messages]
        if moved.done:
            outcome = moved.outcome or (await link.settle([handle], timeout=limit_s))[0]
    talk = excerpt(messages[prompt_length:]) if len(messages) > prompt_length else ""
    return SampledGroup(task.task_id, messages[:prompt_length], [answer_text], [outcome], [[]], 0.0, [talk])


def _find_entry(workshop: Workshop, name: str) -> Entry:
    """The environment of that name or in that file.

    Raises:
        NotFound, InvalidValue: There is none, or the file has several.
    """
    if not name.endswith(".py"):
        return workshop.catalog.find(name)
    from toprope.errors import InvalidValue, NotFound
    from toprope.workbench.entries import Names

    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise NotFound(f"There is no file {path}.", hint="toprope env new NAME writes one.")
    entries = workshop.catalog.in_file(path).entries(Names())
    if len(entries) != 1:
        names = ", ".join(entry.name for entry in entries)
        raise InvalidValue(
            f"{path} declares {plural(len(entries), 'environment')}{f': {names}' if names else ''}.",
            hint="Put it into one of your environment folders and name one; see docs/environments.md."
            if entries
            else "Derive a class from Environment, OwnLoop or ToolEnvironment of toprope.sdk (docs/environments.md).",
        )
    return entries[0]


def _show(group: SampledGroup, index: int, card: Card) -> int:
    from toprope.text_format import number

    [outcome] = group.outcomes
    typer.echo(f"\n--- task {index} ({group.task_id})")
    for message in group.messages:
        typer.echo(f"{message['role']}: {_cut(str(message.get('content', '')))}")
    typer.echo("answer:" if len(group.transcripts) and "\n" in group.transcripts[0] else "answer: ", nl=False)
    text = group.transcripts[0] if group.transcripts else group.texts[0]
    typer.echo(f"\n{_cut(text)}" if "\n" in text else _cut(text))
    parts = ", ".join(f"{name} {number(value)}" for name, value in outcome.parts.items())
    facts = [f"success {'yes' if outcome.success else 'no'}", f"{outcome.turns} turns" if outcome.turns > 1 else ""]
    facts.append("cut at the maximum length" if outcome.truncated else "")
    most = f" of {number(card.max_reward)}" if card.max_reward < _UNDECLARED else ""
    typer.echo(
        f"reward {number(outcome.reward)}{most}"
        f"{f' ({parts})' if parts else ''}; {', '.join(fact for fact in facts if fact)}"
    )
    if outcome.error:
        typer.echo(f"error: {_cut(outcome.error)}")
    return bool(outcome.error)


def _knobs(texts: list[str]) -> dict[str, Any]:
    import json
    import shlex

    import yaml

    values: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise typer.BadParameter(f"--knob {text}: write NAME=VALUE.")
        try:
            values[name.strip()] = yaml.safe_load(value)
            json.dumps(values)
        except (yaml.YAMLError, RecursionError):
            quoted = shlex.quote(f"{name}={json.dumps(value, ensure_ascii=False)}")
            raise typer.BadParameter(f"--knob {text}: the value is not YAML. A text may be quoted: {quoted}") from None
        except (TypeError, ValueError):  # such as a date
            values[name.strip()] = value
    return values


def _cut(text: str) -> str:
    from toprope.errors import visible

    # Text of environments and models must not control the terminal.
    return visible(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [... {len(text)} characters]")


class _Output:
    """Output of the environment, shown after each rollout."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def show(self) -> None:
        text = b"".join(self._pieces).decode(errors="replace").rstrip()
        text = "\n".join(map(printed_line, text.split("\n")))  # the last state of a progress bar
        self._pieces.clear()
        if text:
            typer.echo(f"the environment printed:\n{_cut(text)}", err=True)


class _ProgressLines:
    """Messages about slow work, each printed once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            typer.echo(f"{text} ...", err=True)


def check(
    name: Annotated[str, typer.Argument(help="An environment's name, or a draft's id to check with its settings.")],
    knob: Annotated[
        list[str] | None, typer.Option("--knob", "-k", metavar="NAME=VALUE", help="One of its settings. Repeatable.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Check more tasks, and memory.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=3600, help="The time limit after loading. Default: 25, with --full 45.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that an environment can teach: scores of right and wrong answers, leaks, chance, time.

    Exit status 1 if something must be fixed before training on it.
    """
    from toprope_tools.openings import Caller
    from toprope_tools.planning.environment_check import check_environment
    from toprope_tools.workshop import Workshop

    from toprope.errors import TopropeError

    try:
        workshop = Workshop.open()
        knobs = _knobs(knob or [])
        answer = anyio.run(
            lambda: check_environment(
                workshop, name=name, knobs=knobs, full=full, seconds=seconds, caller=Caller(client=None)
            )
        )
    except TopropeError as error:
        tell(error)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(answer.data.model_dump_json(indent=1))
    else:
        # The last line is an agent's next call.
        typer.echo(in_commands("\n".join(answer.text.split("\n")[:-1])))
    raise typer.Exit(1 if answer.data.model_dump()["verdict"] == "critical" else 0)
