"""The loop of a task that is solved with tools.

An impossible action gives an observation that says so, and never raises: a policy that is learning does impossible
things most of the time.
"""

from __future__ import annotations

from toprope.sdk.errors import InvalidRequest
from toprope.sdk.orchestration.episode import Action, Observation, State
from toprope.sdk.orchestration.tools import Toolbox

__all__ = ["OrchestratorEnvironment"]


class OrchestratorEnvironment:
    """A conversation between a policy and tools.

    Args:
        tools: The tools that the policy can call.
        max_turns: Number of answers, the final one included.
    """

    def __init__(self, tools: Toolbox, max_turns: int = 10) -> None:
        self.tools, self.max_turns = tools, max_turns

    def reset(self, task: str) -> State:
        """The initial state of a task."""
        return State(task)

    def get_available_tools(self) -> list[str]:
        """Names of the tools."""
        return self.tools.names

    def step(self, state: State, action: Action) -> tuple[State, Observation]:
        """Carry out one action and record it in `state`.

        Returns:
            The same state, and the observation; an empty text after the final answer.

        Raises:
            InvalidRequest: The policy has answered or run out of turns; the state is unchanged.
        """
        if self.done(state):
            raise InvalidRequest(
                f"The task is over after {state.num_turns} of at most {self.max_turns} turns: call reset for another."
            )
        if action.problem:
            observation = Observation(f"Your answer could not be read: {action.problem}.", failed=True)
        elif action.is_final_answer:
            state.final_answer = action.tool_input
            observation = Observation("")
        elif state.num_turns + 1 >= self.max_turns:
            observation = Observation(
                f"The last of {self.max_turns} turns is for the final answer; {action.tool_name} was not called.",
                failed=True,
            )
        else:
            observation = self.tools.call(action.tool_name, action.tool_input)
        state.add_turn(action, observation)
        return state, observation

    def done(self, state: State) -> bool:
        """Return True if the policy has answered or run out of turns."""
        answered = bool(state.history) and state.history[-1].action.is_final_answer
        return answered or state.num_turns >= self.max_turns
