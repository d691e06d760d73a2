"""The environments that ship with Toprope, each written as a user would write theirs. `template.py` is one to copy."""
