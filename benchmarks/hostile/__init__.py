"""Attacks on Toprope, with permission: each is tried with its wall, and with the wall taken away as a control."""
