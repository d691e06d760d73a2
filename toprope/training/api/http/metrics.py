"""GET /metrics: the queue and the account of groups in the text format of Prometheus."""

from __future__ import annotations

from toprope.training.api.storage.store import TrajectoryStore

__all__ = ["exposition"]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(store: TrajectoryStore, now: float) -> str:
    """The metrics of a store at `now` (seconds since the epoch), version 0.0.4 of the text format."""
    queue, counts = store.queue, store.queue.counts()
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: dict[str, float], label: str = "") -> None:
        lines.append(f"# HELP toprope_api_{name} {text}")
        lines.append(f"# TYPE toprope_api_{name} {kind}")
        for key, value in values.items():
            labels = f'{{{label}="{key.translate(_ESCAPES)}"}}' if label else ""
            lines.append(f"toprope_api_{name}{labels} {value:.10g}")

    family("waiting_groups", "gauge", "Groups that wait for the trainer.", {"": queue.waiting})
    family("waiting_rows", "gauge", "Sequences in them.", {"": queue.waiting_rows})
    family("waiting_bytes", "gauge", "Bytes of their bodies.", {"": queue.waiting_bytes})
    age = 0.0 if queue.oldest is None else max(0.0, now - queue.oldest)
    family("oldest_waiting_seconds", "gauge", "Age of the group that has waited longest.", {"": age})
    family("delivered_groups", "gauge", "Groups delivered, neither committed nor dropped.", {"": counts.delivered})
    family(
        "step", "gauge", "Batches delivered in this lineage, from the starting step.", {"": store.registry.current_step}
    )
    family("cursor", "gauge", "Groups delivered in this lineage.", {"": queue.delivered})
    family("policy_version", "gauge", "The policy version that the trainer asked with last.", {"": store.version})
    least, most = store.staleness
    family(
        "staleness_versions",
        "gauge",
        "Versions by which the oldest tokens of the last batch's groups were behind.",
        {"min": least, "max": most},
        "bound",
    )
    family("accepted_total", "counter", "Groups accepted.", {"": counts.accepted})
    family("committed_total", "counter", "Groups that a checkpoint has passed.", {"": counts.committed})
    family("duplicates_total", "counter", "Posts of groups that were accepted before.", {"": counts.duplicates})
    family("equal_score_total", "counter", "Accepted groups whose scores are all equal.", {"": counts.equal_score})
    family("unmatched_total", "counter", "Accepted groups whose tokens inference did not know.", {"": counts.unmatched})
    family("dropped_total", "counter", "Groups dropped.", dict(counts.dropped), "reason")
    family("refused_total", "counter", "Posts refused.", dict(counts.refused), "reason")
    lanes = {lane.name: float(lane.rows) for lane in queue.lanes}
    family("environment_waiting_rows", "gauge", "Sequences that wait, by environment.", lanes, "environment")
    return "\n".join(lines) + "\n"
