"""The front doors of Toprope."""
