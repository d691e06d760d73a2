"""GET /metrics: the queue and the account of groups in Prometheus text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from toprope.training.api.storage.store import TrajectoryStore

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def render_metrics(store: TrajectoryStore, now: float) -> str:
    """The metrics of a store at `now`, seconds since the epoch."""
    queue, counts = store.queue, store.queue.counts()
    lines: list[str] = []

    def add(name: str, kind: str, text: str, values: dict[str, float], label: str = "") -> None:
        lines.append(f"# HELP toprope_api_{name} {text}")
        lines.append(f"# TYPE toprope_api_{name} {kind}")
        for key, value in values.items():
            labels = f'{{{label}="{key.translate(_ESCAPES)}"}}' if label else ""
            lines.append(f"toprope_api_{name}{labels} {value:.10g}")

    add("waiting_groups", "gauge", "Groups waiting for the trainer.", {"": queue.waiting})
    add("waiting_rows", "gauge", "Sequences in waiting groups.", {"": queue.waiting_rows})
    add("waiting_bytes", "gauge", "Bytes of the bodies of waiting groups.", {"": queue.waiting_bytes})
    age = 0.0 if queue.oldest is None else max(0.0, now - queue.oldest)
    add("oldest_waiting_seconds", "gauge", "Age of the oldest waiting group.", {"": age})
    add("delivered_groups", "gauge", "Groups delivered and neither committed nor dropped.", {"": counts.delivered})
    add(
        "step", "gauge", "Batches delivered in this lineage, from the starting step.", {"": store.registry.current_step}
    )
    add("cursor", "gauge", "Groups delivered in this lineage.", {"": queue.delivered})
    add("policy_version", "gauge", "The policy version of the trainer's last request.", {"": store.version})
    least, most = store.staleness
    add(
        "staleness_versions",
        "gauge",
        "Age of the oldest tokens of the last batch's groups, in policy versions.",
        {"min": least, "max": most},
        "bound",
    )
    add("accepted_total", "counter", "Groups accepted.", {"": counts.accepted})
    add("committed_total", "counter", "Groups trained on and covered by a checkpoint.", {"": counts.committed})
    add("duplicates_total", "counter", "Repeated posts of accepted groups.", {"": counts.duplicates})
    add("equal_score_total", "counter", "Accepted groups whose scores are all equal.", {"": counts.equal_score})
    add(
        "unmatched_total",
        "counter",
        "Accepted groups whose tokens inference did not recognise.",
        {"": counts.unmatched},
    )
    add("dropped_total", "counter", "Groups dropped.", dict(counts.dropped), "reason")
    add("refused_total", "counter", "Posts refused.", dict(counts.refused), "reason")
    lanes = {lane.name: float(lane.rows) for lane in queue.scheduler}
    add("environment_waiting_rows", "gauge", "Waiting sequences by environment.", lanes, "environment")
    return "\n".join(lines) + "\n"
