"""The page in a real browser: its speed, its weight, what it must never do, and its pictures."""
