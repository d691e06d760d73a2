"""Runs of kind `ask`: put conversations to the policy and store its answers. They load no environment."""

from __future__ import annotations

import asyncio

from toprope.errors import ComponentFailed, InvalidValue
from toprope.records.messages import Evaluated, Finished, Progress, Ready
from toprope.records.run.tested_models import AnsweredConversation, write_answers
from toprope.training.component.member import CrewMember
from toprope.training.inference.client import PolicyClient, Sampling

_AT_ONCE = 8


async def answer_questions(member: CrewMember) -> None:
    """Samples answers to all conversations and writes answers.json; a conversation without an answer has an error.

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

    async def answer(messages: list[dict[str, str]]) -> AnsweredConversation:
        nonlocal done
        async with limit:
            try:
                found = await policy.chat(list(messages), sampling, n=plan.answers)
            except (InvalidValue, ComponentFailed) as error:
                result = AnsweredConversation(messages=messages, error=str(error))
            else:
                result = AnsweredConversation(
                    messages=messages,
                    answers=[one.text for one in found],
                    truncated=[one.truncated for one in found],
                )
        done += 1
        member.report(Progress("asking", done, len(plan.conversations)))
        return result

    try:
        answers = list(await asyncio.gather(*(answer(messages) for messages in plan.conversations)))
    finally:
        await policy.close()
    write_answers(member.folder, answers)
    failed = sum(one.error is not None for one in answers)
    member.report(Evaluated("ask", {"asked": len(answers), "failed": failed}))
    member.report(Finished())
