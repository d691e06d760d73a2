"""The engine of Toprope: what stands behind the tools. See docs/architecture.md for its rooms and floors."""

__version__ = "0.1.0"
