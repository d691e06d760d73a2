"""The wall around workers: `Wall` says what one may do, `plan` and `enter` build it, `kernel` has the means."""

from toprope.sdk.wall.plan import Wall, level_here, namespaces_refusal, network_refusal

__all__ = ["Wall", "level_here", "namespaces_refusal", "network_refusal"]
