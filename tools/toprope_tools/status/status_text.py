"""The text of check_status: conditions met, then each run in a line with its news below, or one line without news.

The answer's cursor holds the last event told of each run; events without room follow in the next call. The index keeps
the numbers told, with their time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toprope.analysis.findings.diagnosis import told as told_by
from toprope.analysis.findings.rules import said
from toprope.analysis.reports.headline import accuracy_on, headline
from toprope.analysis.reports.report import trackers_of
from toprope.errors import Corrupt, NotPossibleNow
from toprope.records.index.stamps import Stamp, write_stamps
from toprope.records.run.launch import cluster_with_files
from toprope.records.run.lifecycle import checks_of, state_of
from toprope.records.run.status import LIVE, CrewMember, Event, Status
from toprope.text_format import ago, call, clip, duration, percent, plural, value
from toprope.untrusted import marked, named
from toprope_tools.answers import runs as answers
from toprope_tools.answers.answer import TOKEN_BUDGET, Answer, tokens
from toprope_tools.status import cursor as places
from toprope_tools.status.causes import causes_of
from toprope_tools.status.snapshot import Look, numbers_line, work_of
from toprope_tools.status.wait import Waited
from toprope_tools.status.wait_conditions import Condition

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_EVENTS = (20, 8, 3, 1)
"""Numbers of events per run to try; the first that fits the budget is used."""
_ALONG = frozenset({"reward", "success", "recent", "rollouts_per_second", "environments"})
"""Numbers of the last batches."""
_CHECKS = {"agent": "policy", "open": "pending"}
"""Words for readers, to whom an agent is the one who reads."""
_BRIEF = frozenset({"step", "total_steps", "reward", "recent", "eta_s", "what", "done", "total", "best"})
"""Numbers told of one of many live runs."""
_OF_FINDING = ("rule", "level", "step", "changes", "follows")
_SHORT = 3
"""Most runs whose last numbers are repeated in an answer without news."""


@dataclass(frozen=True)
class Patience:
    """The wait that a call asked for."""

    asked_s: float
    longest_s: float
    """Call limit of the client, in seconds."""
    until: tuple[Condition, ...] = ()
    by_cursor: bool = False
    """The call named its runs by a cursor alone."""

    @property
    def wait_s(self) -> float:
        """Seconds to wait at most."""
        return min(self.asked_s, self.longest_s)

    @property
    def cut(self) -> bool:
        """True if the client's limit shortens the wait."""
        return self.asked_s > self.longest_s


@dataclass(frozen=True)
class _RunPart:
    """One run's part of an answer."""

    text: str
    item: answers.RunStatus
    place: int
    """Number of the last event told."""
    stamp: Stamp | None
    """To be stored; None if nothing new was told."""
    new: bool
    """It contains something that the caller did not know."""


def tell(workshop: Workshop, waited: Waited, cursor: Mapping[str, int], patience: Patience) -> Answer:
    """Return the answer of check_status with as many events as fit, and store the stamps.

    Args:
        waited: The end of the wait.
        cursor: The caller's cursor, which may contain more runs.
        patience: The wait asked for.
    """
    brief = _is_brief(len(waited.looks), patience)
    causes = {look.run_id: causes_of(workshop, look, brief) for look in waited.looks}
    places_of = {look.run_id: _places(workshop, look) for look in waited.looks}
    for most in _EVENTS:
        parts = [
            _describe_run(look, most, brief, causes[look.run_id], *places_of[look.run_id]) for look in waited.looks
        ]
        answer = _answer(parts, waited, cursor, patience)
        if tokens(answer) <= TOKEN_BUDGET:
            break
    with suppress(NotPossibleNow):  # answer on a full or read-only disk, too
        write_stamps(workshop.index, {part.item.run_id: part.stamp for part in parts if part.stamp is not None})
    return answer


def _answer(parts: Sequence[_RunPart], waited: Waited, cursor: Mapping[str, int], patience: Patience) -> Answer:
    met = waited.met
    going_on = {look.run_id for look in waited.looks if look.status.goes_on}
    live = [part.item.run_id for part in parts if part.item.state in LIVE or part.item.run_id in going_on]
    at = {**cursor, **{part.item.run_id: part.place for part in parts}}
    next_cursor = places.format_cursor({run_id: at[run_id] for run_id in live})
    # A condition that stays met would end the next wait at once.
    met_names = {met_condition.condition for met_condition in met}
    fulfilled = [condition for condition in patience.until if condition.stays_met and condition.name in met_names]
    until = [condition.name for condition in patience.until if condition not in fulfilled]
    until_argument = {"until": until} if until else {}
    if patience.by_cursor and patience.asked_s and until == [condition.name for condition in patience.until]:
        next_line = f'Next: same call, cursor="{next_cursor}"'
    else:
        wait_s = round(patience.longest_s)
        next_line = f"Next: {call('check_status', wait_s=wait_s, **until_argument, cursor=next_cursor)}"
    brief = _is_brief(len(parts), patience)
    # A cursor tells that the caller knows of runs that still wait.
    known_to_wait = patience.by_cursor and any(part.new for part in parts)
    shown_parts = _with_news(parts) if brief or known_to_wait else parts
    states_without_news = Counter(part.item.state for part in parts if part not in shown_parts)
    listed = [part.item for part in shown_parts if not brief or _concerns_programs(part.item)]
    data = answers.StatusAnswer(
        runs=listed,
        unchanged=Counter(part.item.state for part in parts if part.item not in listed),
        met=[
            answers.MetCondition(run_id=met_condition.run_id, condition=met_condition.condition)
            for met_condition in met
        ],
        cursor=places.format_cursor(at),
    )
    if live and not met and not any(part.new for part in parts):
        return Answer(f"No news{_after_wait(patience, waited)}. {_briefly(parts)} {next_line}", data)
    lines = []
    if met:
        met_texts = [f"{met_condition.condition} by {met_condition.run_id}" for met_condition in met[:6]]
        lines.append(f"Met: {', '.join(met_texts)}.")
    elif patience.until:
        lines.append(f"Until: not met{_after_wait(patience, waited)}{'' if live else ' before the end'}.")
    elif patience.cut:
        lines.append(f"This wait was limited to {duration(patience.longest_s)}: the client drops longer calls.")
    lines += [part.text for part in shown_parts]
    # Who waits by a cursor was told of the others before.
    if states_without_news and not (shown_parts and patience.by_cursor):
        lines.append(f"Without news: {', '.join(f'{count} {state}' for state, count in states_without_news.items())}.")
    if live:
        lines.append(next_line)
    ended = [part.item.run_id for part in parts if part.item.run_id not in live and (part.new or not live)]
    goes_on_waiting = bool(live) and bool(patience.until) and not met
    if ended and not goes_on_waiting:
        lines.append(f"Ended: {', '.join(call('get_results', run_id=run_id) for run_id in ended[:3])}")
    return Answer("\n".join(lines), data)


def _is_brief(runs: int, patience: Patience) -> bool:
    """Return True if an answer is brief on each run: on many runs, or on several for a caller who goes on waiting."""
    return runs > _SHORT or (patience.by_cursor and runs > 1)


def _concerns_programs(item: answers.RunStatus) -> bool:
    """True if a run has more than new numbers."""
    wrong = item.components or item.failure or "failed" in item.checks.values()
    return bool(item.states or item.events or wrong) or item.state not in LIVE


def _with_news(parts: Sequence[_RunPart]) -> list[_RunPart]:
    """Return the runs of many that an answer tells of: those with news, and of those that just queued the first."""
    new = [part for part in parts if part.new]
    queued = [part for part in new if part.item.state == "queued" and not part.item.events]
    return [part for part in new if part not in queued[1:]]


def _after_wait(patience: Patience, waited: Waited) -> str:
    if waited.seconds < min(1.0, patience.wait_s) or not patience.wait_s:
        return ""
    cut = patience.cut and waited.seconds >= patience.longest_s and not patience.by_cursor
    return f" in {duration(waited.seconds)}" + (", the client's limit" if cut else "")


def _briefly(parts: Sequence[_RunPart]) -> str:
    """Return all runs in one line."""
    shown_parts = parts if len(parts) <= _SHORT else parts[:1]
    text, hidden = " ".join(part.text for part in shown_parts), len(parts) - len(shown_parts)
    return f"{text} And {plural(hidden, 'more run')}." if hidden else text


def _places(workshop: Workshop, look: Look) -> tuple[str, dict[str, str]]:
    """Return a run's folder of logs, and its page or folder at each tracker."""
    folder = workshop.runs.folder(look.run_id)
    try:
        trackers, cluster = trackers_of(folder), cluster_with_files(folder)
    except Corrupt:
        trackers, cluster = {}, ""
    there = f" (on the cluster {cluster})" if cluster else ""
    found = {name: (tracker.get("url"), tracker.get("folder")) for name, tracker in trackers.items()}
    return str(folder.logs), {
        name: clip(str(url or f"{path}{there}"), 300) for name, (url, path) in found.items() if url or path
    }


def components(status: Status) -> dict[str, str]:
    """Return the state of each component: running, or exited with its code."""
    states = {}
    for name, member in status.crew.items():
        text = {"starting": "starting", "ready": "running"}.get(member.state) or _exited(member)
        restarts = member.restarts + member.worker_restarts
        states[name] = f"{text}, {plural(restarts, 'restart')}" if restarts else text
    return states


def _exited(member: CrewMember) -> str:
    return f"{member.state} ({'killed' if member.exit_code is None else member.exit_code})"


def _describe_run(
    look: Look, most: int, brief: bool, causes: str = "", logs: str = "", trackers: Mapping[str, str] | None = None
) -> _RunPart:
    """Return one run's part with at most `most` events: the next ones after a cursor, or else the newest.

    Args:
        brief: Be brief, and leave out components and trackers of a run that is well; an answer about it alone has them.
        causes: Of an ended run, from `causes_of`.
        logs, trackers: From `_places`.
    """
    status, stamp, has_cursor = look.status, look.stamp, look.place is not None
    events = look.news[:most] if has_cursor else look.news[-most:]
    events_left = len(look.news) - len(events)
    last_seq = (
        look.events[-1].seq if look.events else (look.place if look.place is not None else stamp.seq if stamp else 0)
    )
    place = events[-1].seq if has_cursor and events_left else last_seq
    if look.due or stamp is None:
        fresh, numbers, at = True, look.numbers, look.now
    else:
        fresh, numbers, at = False, stamp.snapshot, stamp.at
    seq = max(place, stamp.seq if stamp else 0)
    new_stamp: Stamp | None = Stamp(at, seq, numbers)
    if stamp is not None and seq == stamp.seq and (not fresh or (status.ended and numbers == stamp.snapshot)):
        new_stamp = None
    limited = not status.ended and bool(work_of(numbers))
    next_in = max(0.0, round(at + look.interval_s - look.now, 1)) if limited else None
    line = f"{status.run_id}: {status.state}"
    if status.reason and status.failure is None:
        line += f" ({marked(status.reason, 200)})"
    if brief and not status.ended:
        line += f"; {numbers_line({key: number for key, number in numbers.items() if key in _BRIEF})}"
        line += "." if fresh else f" ({ago(at, look.now)})."
    elif fresh:
        line += f"; {_ended(status, numbers) if status.ended else numbers_line(numbers)}."
        if next_in:
            line += f" Next numbers in {duration(next_in)}."
    else:
        line += f"; numbers of {ago(at, look.now)}: {numbers_line(numbers)}. Next in {duration(next_in or 0)}."
    checks = _open_checks(status)
    if checks and (events and not brief or "failed" in checks.values()):
        line += " Checks: " + ", ".join(f"{name} {state}" for name, state in checks.items()) + "."
    component_states = components(status)
    exited = [f"{name} {state}" for name, state in component_states.items() if state.startswith("exited")]
    known_already = stamp is not None and not exited and not (status.ended and not look.told_the_end)
    if known_already or (brief and not exited):
        component_states, trackers = {}, {}
    line += "".join(f" {name}: {url}." for name, url in (trackers or {}).items())
    if exited:
        line += f" Components: {', '.join(exited)}; logs in {logs}."
    line += "".join(f"\n  {text}" for text in (_news_in_brief(events, status) if brief else _news(events)))
    if events_left:
        which, since = ("after", place) if has_cursor else ("before", look.events[0].seq - 1)
        line += f'\n  {plural(events_left, "event")} {which} these: cursor="{status.run_id}:{since}" shows them.'
    failure = status.failure
    if failure is not None:
        line += f"\n  failed: {failure.component}: {marked(failure.reason, 300)} {clip(failure.hint, 400)}".rstrip()
    line += f"\n  {causes}" if causes else ""
    item = answers.RunStatus(
        run_id=status.run_id,
        kind="" if known_already else status.kind,
        environment="" if known_already else status.environment,
        state=status.state,
        fresh=fresh,
        numbers={} if brief else numbers,
        next_numbers_in_s=next_in,
        states=[str(event.data.get("to")) for event in events if event.kind == "state"],
        events=[_structured(event) for event in _newest(events) if event.kind not in ("state", "end")],
        events_left=events_left,
        failure=None if failure is None else _failure(failure.model_dump(mode="json"), most),
        lifecycle=state_of(status),
        checks=checks,
        components=component_states,
        logs=logs if component_states else "",
        trackers=dict(trackers or {}),
    )
    new = bool(events) or (status.ended and not look.told_the_end) or (fresh and look.has_new_numbers) or stamp is None
    return _RunPart(line, item, place, new_stamp, new)


def _ended(status: Status, numbers: Mapping[str, Any]) -> str:
    """Return an ended run's accuracy, or else the reward and success of its last batches."""
    accuracy = headline(status)
    if accuracy is None:
        progress_numbers = {key: number for key, number in numbers.items() if key not in _ALONG}
        batch_numbers = {key: numbers[key] for key in ("reward", "success", "recent") if key in numbers}
        last = "at its end" if "recent" in numbers else "its last batch alone"
        return numbers_line(progress_numbers) + (f"; {last}: {numbers_line(batch_numbers)}" if batch_numbers else "")
    return f"{accuracy}; {numbers_line({key: number for key, number in numbers.items() if key not in _ALONG})}"


def _open_checks(status: Status) -> dict[str, str]:
    """Return the state of a run's checks while they run or if one failed; empty once all have passed."""
    checks = {_CHECKS.get(name, name): _CHECKS.get(state, state) for name, state in checks_of(status).items()}
    relevant = status.state in ("validating", "starting") or "failed" in checks.values()
    return checks if relevant and set(checks.values()) != {"passed"} else {}


def _structured(event: Event) -> dict[str, Any]:
    """Return what programs need of an event; the text has the sentences, and get_results the rest of a finding."""
    data = event.data
    if event.kind == "evaluation" and isinstance(data.get("summary"), dict):
        data = {"label": data.get("label"), "accuracy": data["summary"].get("accuracy")}
    keys = _OF_FINDING if event.kind == "finding" else data
    return {"kind": event.kind, "data": {key: data[key] for key in keys if data.get(key) not in (None, "", {})}}


def _failure(failure: dict[str, Any], most: int) -> dict[str, Any]:
    return {**failure, "excerpt": [clip(line, 300) for line in failure["excerpt"][-min(most, 10) :]]}


def _news(events: Sequence[Event]) -> list[str]:
    """Format events as short lines; consecutive states are one line, and so is what follows from a finding."""
    states = [str(event.data.get("to")) for event in events if event.kind == "state"]
    lines = [f"new: {' -> '.join(states[-6:])}"] if states else []
    below: dict[str, list[str]] = {}
    for event in _newest(events):
        if event.kind in ("state", "end"):
            continue
        cause, level = event.data.get("follows"), event.data.get("level")
        if event.kind == "finding" and cause and level != "over":
            below.setdefault(named(cause, 60), []).append(_rule(event.data))
        else:
            lines.append(f"new: {_event(event)}")
    return lines + [f"new: from {cause} follow {', '.join(rules)}: mend it first" for cause, rules in below.items()]


def _news_in_brief(events: Sequence[Event], status: Status) -> list[str]:
    """Format the events of one of many runs in a line: findings with their edits, not what the run's own line says."""
    texts = []
    for event in _newest(events):
        if event.kind == "finding":
            texts.append(_finding_in_brief(event.data))
        elif event.kind not in ("state", "end") and not (event.kind == "evaluation" and headline(status)):
            texts.append(_event(event))
    return [f"new: {'; '.join(texts)}"] if texts else []


def _finding_in_brief(data: Mapping[str, Any]) -> str:
    """Return `rule (level: edit)`, with the cause or the sentence in place of an edit that it has not."""
    level, changes = data.get("level"), data.get("changes")
    if level == "over":
        detail = ""
    elif data.get("follows"):
        detail = f", from {named(data['follows'], 60)}"
    elif isinstance(changes, dict) and changes:
        detail = f": {said(changes)}"
    else:
        detail = f": {told_by(data.get('rule'), data.get('what', ''), 120)}"
    return _rule(data, detail)


def _rule(data: Mapping[str, Any], detail: str = "") -> str:
    return f"{named(data.get('rule', ''), 60)} ({named(data.get('level'))}{detail})"


def _newest(events: Sequence[Event]) -> list[Event]:
    """Leave out findings that a later event of the same rule replaces."""
    last_of_rule = {event.data.get("rule"): event for event in events if event.kind == "finding"}
    return [event for event in events if event.kind != "finding" or last_of_rule[event.data.get("rule")] is event]


def _event(event: Event) -> str:
    data = event.data
    if event.kind == "evaluation":
        return f"evaluation {_evaluation(data)}"
    if event.kind == "finding":
        head = f"{named(data.get('rule', ''), 60)} is over" if data.get("level") == "over" else _rule(data)
        next_line = f" Next: {told_by(data.get('rule'), data['next'], 200)}" if data.get("next") else ""
        return f"finding {head}: {told_by(data.get('rule'), data.get('what', ''), 240)}{next_line}"
    if isinstance(data.get("what"), str):
        return f"{event.kind}{' is over' if data.get('over') is True else ''}: {_text_with_advice(data)}"
    fields = ", ".join(f"{key} {value(field_value)}" for key, field_value in data.items())
    return f"{event.kind}: {clip(fields, 200)}"


def _text_with_advice(data: Mapping[str, Any]) -> str:
    """Return the text of an event and its advice."""
    return clip(data.get("what", ""), 240) + (f" Next: {clip(data['next'], 200)}" if data.get("next") else "")


def _evaluation(data: Mapping[str, Any]) -> str:
    own_summary = data.get("summary")
    summary = own_summary if isinstance(own_summary, dict) else data
    label = data.get("label", "")
    if summary.get("accuracy") is None:
        figures = ", ".join(f"{key} {value(number)}" for key, number in summary.items() if key != "label")
        return f"{label}: {clip(figures, 200) or 'without an accuracy'}"
    text = f"{label}: {accuracy_on(str(summary.get('split', '')))} {percent(summary['accuracy'])}"
    if summary.get("tasks"):
        text += f" on {plural(summary['tasks'], 'task')}"
    environments = summary.get("environments")
    if isinstance(environments, dict):
        listed = list(environments.items())[:8]
        accuracies = [f"{named(label, 60)} {percent(environment.get('accuracy'))}" for label, environment in listed]
        text += f" ({', '.join(accuracies)})"
    return text
