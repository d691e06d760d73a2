"""The server object of an Atropos environment: it samples from the policy with the keys of a group's rollouts.

Atropos knows a server but no rollouts: `collect_trajectories` may request n answers at once, or one answer n times, and
continue any of them. The text that a request continues shows which rollout it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from toprope.sdk.authoring.env_managed import Session

__all__ = ["GROUP", "Group", "Scores", "server_class"]


@dataclass
class _Rollout:
    session: Session
    said: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    busy: bool = False


class Group:
    """The rollouts of a group."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.rollouts = [_Rollout(session) for session in sessions]
        self.scores: Any = None
        """The newest scores that the environment made; it may return none of them."""

    def take(self, count: int, before: str) -> list[_Rollout]:
        """Return the rollouts of `count` answers.

        Args:
            count: Number of requested answers.
            before: Text that the request continues.
        """
        taken: list[_Rollout] = []
        if count == 1:
            going = [one for one in self.rollouts if one.said and not one.busy and one.said[-1].strip()]
            # Longest first: a short answer may be contained in another.
            going.sort(key=lambda one: -len("".join(one.said)))
            taken = [one for one in going if all(said in before for said in one.said)][:1]
        for said, busy in ((False, False), (True, False), (True, True)):  # what a free rollout may have
            left = [
                one for one in self.rollouts if one not in taken and (said or not one.said) and (busy or not one.busy)
            ]
            taken += left[: count - len(taken)]
        while len(taken) < count:  # more answers than rollouts
            taken.append(self.rollouts[len(taken) % len(self.rollouts)])
        for one in taken:
            one.busy = True
        return taken

    def whose(self, texts: Sequence[str]) -> list[int | None]:
        """Assign to each scored text the rollout whose answers it contains, each rollout once."""
        left = set(range(len(self.rollouts)))
        found: list[int | None] = []
        for text in texts:
            fitting = [
                place
                for place in sorted(left)
                if self.rollouts[place].said and self.rollouts[place].said[-1].strip() in text
            ]
            fitting.sort(key=lambda place: -len(self.rollouts[place].said[-1]))
            if fitting:
                left.discard(fitting[0])
            found.append(fitting[0] if fitting else None)
        for place, owner in enumerate(found):  # assign the rest by position
            if owner is None and place in left:
                left.discard(place)
                found[place] = place
        if len(left) == 1 and found.count(None) == 1:
            found[found.index(None)] = left.pop()
        return found


GROUP: ContextVar[Group | None] = ContextVar("group", default=None)
"""The group of the present asyncio task."""


class Scores(dict[str, Any]):
    """An environment's `ScoredDataGroup`, kept with its group.

    Many environments return nothing if all scores of a group are equal, although they have them.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._kept()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._kept()

    def _kept(self) -> None:
        group = GROUP.get()
        if group is not None and {"tokens", "scores"} <= self.keys():
            group.scores = self

    @classmethod
    def install(cls, module: Any) -> None:
        """Have the environments of a module make their scores so."""
        if hasattr(module, "ScoredDataGroup"):
            module.ScoredDataGroup = cls


def server_class(tokenizer: Callable[[], Any]) -> type:
    """Return an atroposlib server class; atroposlib must be importable.

    Args:
        tokenizer: Returns the environment's tokenizer.
    """
    import httpx
    import openai
    from atroposlib.envs.server_handling.server_baseline import APIServer

    class PolicyServer(APIServer):  # type: ignore[misc]
        """Requests one answer at a time with the key of its rollout."""

        def __init__(self, config: Any, reasoning_config: Any = None) -> None:
            super().__init__(config, reasoning_config=None)
            self.initialized = True
            self._clients: dict[str, Any] = {}

        @property
        def tokenizer(self) -> Any:
            return tokenizer()

        async def check_server_status_task(self, chat_completion: bool = True) -> None:
            self.server_healthy = True

        async def _chat_completion_wrapper(self, **asked: Any) -> Any:
            messages = asked["messages"]
            before = "\n".join(str(one.get("content") or "") for one in messages)
            answers = await self._asked(asked, before, lambda client: client.chat.completions.create)
            for rollout, answer in answers:
                rollout.said.append(answer.choices[0].message.content or "")
                rollout.messages = [*messages, {"role": "assistant", "content": rollout.said[-1]}]
            return _joined([answer for _, answer in answers])

        async def _completion_wrapper(self, **asked: Any) -> Any:
            answers = await self._completed(asked)
            return _joined([answer for _, answer in answers])

        async def _tokens_and_logprobs_completion_wrapper(self, **asked: Any) -> tuple[list[Any], ...]:
            if (ids := asked.pop("input_ids", None)) is not None:
                asked["prompt"] = ids
            asked["extra_body"] = {**(asked.get("extra_body") or {}), "return_token_ids": True}
            answers = [answer for _, answer in await self._completed(asked)]
            prompt = getattr(answers[0], "prompt_token_ids", None)
            if prompt is None:
                prompt = asked["prompt"] if isinstance(asked["prompt"], list) else self._encoded(asked["prompt"])
            choices = [answer.choices[0] for answer in answers]
            tokens = [getattr(choice, "token_ids", None) or self._encoded(choice.text) for choice in choices]
            values = [
                getattr(choice, "token_logprobs", None) or [0.0] * len(ids)
                for choice, ids in zip(choices, tokens, strict=True)
            ]
            return prompt, tokens, values, [choice.finish_reason for choice in choices]

        async def _completed(self, asked: dict[str, Any]) -> list[tuple[_Rollout, Any]]:
            prompt = asked["prompt"]
            before = prompt if isinstance(prompt, str) else tokenizer().decode(prompt)
            answers = await self._asked(asked, before, lambda client: client.completions.create)
            for rollout, answer in answers:
                rollout.said.append(answer.choices[0].text or "")
                rollout.messages = []
            return answers

        def _encoded(self, text: str) -> list[int]:
            return list(tokenizer()(text, add_special_tokens=False)["input_ids"])

        async def _asked(
            self, asked: dict[str, Any], before: str, method: Callable[[Any], Any]
        ) -> list[tuple[_Rollout, Any]]:
            group = GROUP.get()
            if group is None:
                raise RuntimeError("the environment used its server outside collect_trajectories")
            rollouts = group.take(int(asked.pop("n", 1) or 1), before)
            try:
                answers = await asyncio.gather(*(self._one(asked, one.session, method) for one in rollouts))
            finally:
                for one in rollouts:
                    one.busy = False
            return list(zip(rollouts, answers, strict=True))

        async def _one(self, asked: dict[str, Any], session: Session, method: Callable[[Any], Any]) -> Any:
            known = {name: value for name, value in asked.items() if name not in ("split", "model")}
            known.setdefault("temperature", session.temperature)
            known.setdefault("top_p", session.top_p)
            wanted = known.pop("max_completion_tokens", None) or known.get("max_tokens") or session.max_tokens
            known["max_tokens"] = min(int(wanted), session.max_tokens)
            if session.stop and not known.get("stop"):
                known["stop"] = list(session.stop)
            if session.seed is not None:
                known.setdefault("seed", session.seed)
            headers = {**(known.pop("extra_headers", None) or {}), "Authorization": f"Bearer {session.api_key}"}
            create = method(self._client(session.base_url))
            return await create(model=session.model, extra_headers=headers, **known)

        def _client(self, base_url: str) -> Any:
            if base_url not in self._clients:
                self._clients[base_url] = openai.AsyncOpenAI(
                    base_url=base_url, api_key="of the rollout", timeout=httpx.Timeout(None), max_retries=1
                )
            return self._clients[base_url]

    return PolicyServer


def _joined(answers: list[Any]) -> Any:
    first = answers[0]
    first.choices = [answer.choices[0] for answer in answers]
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first
