"""The names that authors of environments import: `from toprope.sdk import Environment, Part, Task, knob`.

The package loads into any interpreter that an environment needs, next to any packages. It therefore uses the standard
library only, imports nothing else of Toprope, and has no side effects.
"""

from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Environment, Outcome, Part, Task
from toprope.sdk.authoring.knobs import knob
from toprope.sdk.rollouts import play

__all__ = ["Environment", "Outcome", "OwnLoop", "Part", "Played", "Session", "Task", "knob", "play"]
