"""Runs of kind `ask`: put conversations to the policy and store its answers, or serve it. They load no environment."""

from __future__ import annotations

import asyncio
import time

from toprope.errors import ComponentFailed, InvalidValue
from toprope.records.messages import Evaluated, Finished, Progress, Ready
from toprope.records.run.tested_models import AnsweredConversation, Served, write_answers, write_served
from toprope.training.component.member import CrewMember
from toprope.training.evaluation.standard_tasks import measure_tasks
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.inference.sessions import UNRECORDED, session_key

_AT_ONCE = 8
_LOOK_S, _TELL_S = 0.25, 10.0


async def answer_questions(member: CrewMember) -> None:
    """Samples answers to all conversations and writes answers.json; a conversation without an answer has an error.
    Or measures standard tasks, or serves the policy, as the plan says.

    Raises:
        ComponentFailed: The policy cannot be reached.
    """
    plan, config = member.spec.ask, member.spec.config
    assert plan is not None, "the run is of kind ask"
    member.report(Ready())
    await member.address_async("inference")
    if plan.standard is not None:
        await measure_tasks(member, plan, plan.standard)
        return
    if plan.serve_s is not None:
        await _serve(member, plan.serve_s)
        return
    policy = PolicyClient(lambda: member.peer("inference"), member.secret)
    sampling = Sampling(plan.temperature, config.rollout.top_p, plan.max_new_tokens, tuple(config.rollout.stop))
    sampling = sampling if plan.temperature > 0 else sampling.greedy()
    limit, done = asyncio.Semaphore(_AT_ONCE), 0

    async def answer(messages: list[dict[str, str]]) -> AnsweredConversation:
        nonlocal done
        async with limit:
            try:
                samples = await policy.chat(list(messages), sampling, n=plan.answers)
            except (InvalidValue, ComponentFailed) as error:
                result = AnsweredConversation(messages=messages, error=str(error))
            else:
                result = AnsweredConversation(
                    messages=messages,
                    answers=[sample.text for sample in samples],
                    truncated=[sample.truncated for sample in samples],
                )
        done += 1
        member.report(Progress("asking", done, len(plan.conversations)))
        return result

    try:
        answers = list(await asyncio.gather(*(answer(messages) for messages in plan.conversations)))
    finally:
        await policy.close()
    write_answers(member.folder, answers)
    failed = sum(conversation.error is not None for conversation in answers)
    member.report(Evaluated("ask", {"asked": len(answers), "failed": failed}))
    member.report(Finished())


async def _serve(member: CrewMember, seconds: float) -> None:
    """Keeps address and key of the policy in the run's folder, for other programs, until the time is over or the run
    ends. The key opens questions to the policy alone."""
    key = session_key(member.secret, UNRECORDED)
    began = time.monotonic()
    until, reported_at, address = time.time() + seconds, float("-inf"), None
    while (passed := time.monotonic() - began) < seconds and not member.ending.is_set():
        if (now := member.peer("inference")) is not None and now != address:  # it changes if inference is restarted
            address = now
            write_served(member.folder, key, Served(url=f"{address}/v1", until=until))
        if passed - reported_at > _TELL_S:
            reported_at = passed
            member.report(Progress("serving", round(passed), round(seconds)))
        await asyncio.sleep(_LOOK_S)
    member.report(Evaluated("ask", {}))
    member.report(Finished())
