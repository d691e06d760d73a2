"""What the author of an environment imports: `from toprope.sdk import Environment, Part, Task, knob`.

This package loads in whatever interpreter an environment needs, next to whatever is installed there. It therefore uses
the standard library only, imports nothing else of Toprope, and has no side effects.
"""

from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Environment, Outcome, Part, Task
from toprope.sdk.authoring.knobs import knob
from toprope.sdk.rollouts import play

__all__ = ["Environment", "Outcome", "OwnLoop", "Part", "Played", "Session", "Task", "knob", "play"]
