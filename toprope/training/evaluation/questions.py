"""What a run of kind `ask` does: puts conversations to the policy and keeps the answers. It loads no environment."""

from __future__ import annotations

import asyncio

from toprope.errors import ComponentFailed, InvalidValue
from toprope.records.messages import Evaluated, Finished, Progress, Ready
from toprope.records.run.tested_models import AnswersTo, write_answers
from toprope.training.component.member import CrewMember
from toprope.training.inference.client import PolicyClient, Sampling

__all__ = ["ask"]

_AT_ONCE = 8


async def ask(member: CrewMember) -> None:
    """Asks all conversations and writes answers.json. One that cannot be answered says why.

    Raises:
        ComponentFailed: The policy cannot be reached.
    """
    plan, config = member.spec.ask, member.spec.config
    if plan is None:
        raise ComponentFailed("The run's specification holds no questions.")
    member.report(Ready())
    await member.address_async("inference")
    policy = PolicyClient(lambda: member.peer("inference"), member.secret)
    sampling = Sampling(plan.temperature, config.rollout.top_p, plan.max_new_tokens, tuple(config.rollout.stop))
    sampling = sampling if plan.temperature > 0 else sampling.greedy()
    limit, done = asyncio.Semaphore(_AT_ONCE), 0

    async def one(messages: list[dict[str, str]]) -> AnswersTo:
        nonlocal done
        async with limit:
            try:
                given = await policy.chat(list(messages), sampling, n=plan.answers)
            except (InvalidValue, ComponentFailed) as error:
                answered = AnswersTo(messages=messages, error=str(error))
            else:
                answered = AnswersTo(
                    messages=messages,
                    answers=[answer.text for answer in given],
                    truncated=[answer.truncated for answer in given],
                )
        done += 1
        member.report(Progress("asking", done, len(plan.conversations)))
        return answered

    try:
        answers = list(await asyncio.gather(*(one(messages) for messages in plan.conversations)))
    finally:
        await policy.close()
    write_answers(member.folder, answers)
    failed = sum(answer.error is not None for answer in answers)
    member.report(Evaluated("ask", {"asked": len(answers), "failed": failed}))
    member.report(Finished())
