"""Rollouts that a training script samples itself: one call per rollout, rewards of a group, errors, and turns."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.sdk.adapters.trl.conftest import Policy, outcomes, played, session_of, task_of
from toprope.sdk.adapters._trl.rollouts import TrlRollouts
from toprope.sdk.authoring.env_managed import sample_group
from toprope.sdk.authoring.policy_client import PolicyRefused
from toprope.sdk.rollouts import configure
from toprope.sdk.worker.client import WorkerClient
from toprope.sdk.worker.scripted_policy import scripted_session

Made = Callable[..., TrlRollouts]
FULL = PolicyRefused("the policy's server answered 400: the prompt leaves no room for an answer")
DOWN = PolicyRefused("the policy's server answered 503: gone")

GAME = """
    def rollout_func(prompts, trainer):
        said, answer = [], None
        for turn in range(3):
            answer = asked(trainer, prompts[0], *said)
            said.append(answer["text"])
        return one(answer, env_reward=float(len(said)), said=said)
"""
SWALLOWING = """
    def rollout_func(prompts, trainer):
        answer = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.0]}
        for turn in range(3):
            try:
                answer = asked(trainer, prompts[0])
            except KIND:
                break
        return one(answer, env_reward=-0.2)
"""


def test_fields_of_the_rollout_function_reach_the_rewards_of_a_group_in_one_call(made: Made, policy: Policy) -> None:
    environment = made(
        """
        calls = []
        def rollout_func(prompts, trainer):
            answer = asked(trainer, prompts[0])
            return one(answer, env_reward=2.0, env_mask=[1], solution="mine") | {"shared": (1, 2), "none": []}
        def reward(prompts, completions, completion_ids, env_reward, solution, **columns):
            calls.append((prompts, completions, completion_ids, solution, columns))
            return [value if text == "yes" else 0.5 for value, text in zip(env_reward, completions)]
        """
    )
    said = iter(["yes", "no\n", "yes"])
    policy.answer = lambda messages: next(said)
    assert [one.reward for one in outcomes(environment, 3)] == [2.0, 0.5, 2.0]
    [(prompts, completions, ids, solution, columns)] = environment._user.module.calls
    assert prompts == ["What is 0+1?"] * 3 and completions == ["yes", "no\n", "yes"]
    assert [len(one) for one in ids] == [4, 4, 4], "an answer that was not cut ends with the end token"
    assert solution == ["mine"] * 3 and columns["shared"] == [(1, 2)] * 3
    assert not {"env_mask", "none", "prompt"} & columns.keys()
    with pytest.raises(AttributeError, match="trainer_state.global_step is not known"):
        assert columns["trainer_state"].global_step


def test_completions_of_messages_are_messages(made: Made, policy: Policy) -> None:
    environment = made(
        """
        rows = [{"prompt": [{"role": "user", "content": f"Say {n}."}]} for n in range(9)]
        def rollout_func(prompts, trainer):
            return one(generate_rollout_completions(trainer, prompts, as_chat=True)[0])
        def reward(prompts, completions, **columns):
            assert prompts == [[{"role": "user", "content": "Say 0."}]]
            return [float(one == [{"role": "assistant", "content": "yes"}]) for one in completions]
        """
    )
    [outcome] = outcomes(environment)
    assert (outcome.reward, outcome.error, outcome.success) == (1.0, None, True)
    assert policy.requests[0][1] == [{"role": "user", "content": "Say 0."}]


def test_random_numbers_and_steps_are_equal_within_a_group(made: Made, policy: Policy) -> None:
    function = """
        import random
        import numpy
        def rollout_func(prompts, trainer):
            drawn = random.random(), numpy.random.random(), trainer.state.global_step
            answer = asked(trainer, prompts[0])
            return one(answer, env_reward=0.0, drawn=(*drawn, random.random()))
        seen = []
        def reward(completions, drawn, **columns):
            seen.append(drawn)
            return [random.random()] * len(drawn)
        """
    environment = made(function)
    scored = [one.reward for task in (0, 1) for one in outcomes(environment, 3, task)]
    first, second = environment._user.module.seen
    assert first == [first[0]] * 3 and second == [second[0]] * 3
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    again = made(function)
    assert [one.reward for task in (0, 1) for one in outcomes(again, 3, task)] == scored
    assert again._user.module.seen == [first, second], "equal in every process"
    assert len({task.id for task in again.tasks()}) == 40


def test_rollouts_share_a_client_one_after_another_and_waiting_takes_none_of_their_time(
    made: Made, policy: Policy
) -> None:
    environment = made(
        """
        class Client:
            busy = 0
        def rollout_func(prompts, trainer):
            Client.busy += 1
            answers = [asked(trainer, prompts[0], str(n)) for n in range(2)]
            assert Client.busy == 1, "two at once"
            Client.busy -= 1
            return one(answers[-1], env_reward=1.0)
        """
    )
    policy.delay_s = 0.1
    results = outcomes(environment, 6, timeout_s=0.9)
    assert [one.error for one in results] == [None] * 6 and [one.turns for one in results] == [2] * 6
    keys = [key for key, _, _ in policy.requests]
    assert keys == sorted(keys), "each rollout asked under its own key"
    assert environment.takes_turns


@pytest.mark.parametrize("kind", ["Exception", ""])
def test_a_failed_answer_is_an_error_although_the_script_handles_it(made: Made, policy: Policy, kind: str) -> None:
    environment = made(SWALLOWING.replace(" KIND", f" {kind}" if kind else ""))
    policy.answer = lambda messages: DOWN
    [outcome] = outcomes(environment)
    assert outcome.error is not None and "answered 503: gone" in outcome.error and outcome.reward == 0.0
    policy.answer = lambda messages: "yes"
    assert outcomes(environment)[0].reward == -0.2


def test_a_full_context_ends_a_game_with_its_reward(made: Made, policy: Policy) -> None:
    environment = made(GAME)
    policy.answer = lambda messages: "go" if len(messages) < 3 else FULL
    [outcome] = outcomes(environment)
    assert (outcome.reward, outcome.truncated, outcome.turns, outcome.error) == (3.0, True, 2, None)
    policy.answer = lambda messages: FULL
    [outcome] = outcomes(environment)
    assert outcome.error is not None and "no room for an answer" in outcome.error, "not even the task fits"
    endless = made(GAME.replace("for turn in range(3):", "while True:"))
    policy.answer = lambda messages: "go" if len(messages) < 3 else FULL
    [outcome] = outcomes(endless)
    assert outcome.error is not None and "it must end a game in which answers are empty" in outcome.error


def test_answers_beyond_the_most_turns_are_empty(made: Made, policy: Policy) -> None:
    environment = made(GAME, turns=2)
    [outcome] = outcomes(environment)
    assert (outcome.reward, outcome.truncated, outcome.turns, len(policy.requests)) == (3.0, True, 2, 2)


def test_a_late_rollout_asks_nothing_more_and_the_next_waits_for_its_end(made: Made, policy: Policy) -> None:
    environment = made(
        """
        import threading, time
        going, let_go = threading.Event(), threading.Event()
        log = []
        def rollout_func(prompts, trainer):
            answer = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.0]}
            for turn in range(3):
                try:
                    answer = asked(trainer, "late" if not log else "next")
                except:
                    log.append("refused")
                    if not going.is_set():
                        going.set()
                        let_go.wait()
                    return one(answer, env_reward=9.0)
            log.append("done")
            return one(answer, env_reward=1.0)
        """
    )
    script, environment._turns.longest_going_s = environment._user.module, 0.2

    async def hang(session: Any, messages: Any, **more: Any) -> Any:
        policy.requests.append(("", messages, more))
        if messages[0]["content"] == "late":
            await asyncio.sleep(60)
        return {"content": "yes", "finish_reason": "stop"}

    async def main() -> list[Any]:
        [late] = await played(environment, timeout_s=0.3)
        [blocked] = await played(environment)
        script.let_go.set()
        [thread] = [one for one in threading.enumerate() if one.name == "rollout"]
        thread.join(10)
        [free] = await played(environment)
        return [late, blocked, free]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toprope.sdk.adapters._trl.trainer.ask", hang)
        late, blocked, free = asyncio.run(main())
    assert late.error == "TimeoutError: the rollout took longer than 0.3 s"
    assert "still at work after 0.2 s" in blocked.error and "so none can begin" in blocked.error
    assert (free.error, free.reward) == (None, 1.0) and script.log == ["refused", "done"]
    assert [messages[0]["content"] for _, messages, _ in policy.requests] == ["late"] + ["next"] * 3


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[answer]", "list came"),
        ("{'prompt_ids': [[1]]}", "prompt_ids came"),
        ("one(answer) | {'completion_ids': [[1]] * 8}", "of completion_ids came 8 entries for 1 prompt"),
        ("one(answer) | {'logprobs': []}", "of logprobs came 0 entries for 1 prompt"),
        ("one(answer) | {'prompt_ids': 3}", "of prompt_ids came int for 1 prompt"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("__import__('sys').exit(3)", "called sys.exit(3)"),
        ("next(iter(()))", "StopIteration"),
    ],
)
def test_wrong_results_are_errors_of_their_rollout(made: Made, policy: Policy, returned: str, said: str) -> None:
    function = f"""
        def rollout_func(prompts, trainer):
            answer = asked(trainer, prompts[0])
            return {returned} if answer["text"] == "no" else one(answer, env_reward=1.0)
        """
    environment = made(function)
    answers = iter(["yes", "no", "yes"])
    policy.answer = lambda messages: next(answers)
    good, bad, other = outcomes(environment, 3)
    assert (good.reward, other.reward) == (1.0, 1.0) and bad.error is not None and said in bad.error
    if "came" in said:
        assert "must return a dictionary with prompt_ids, completion_ids, logprobs" in bad.error


def test_a_reward_that_fails_or_a_rollout_without_an_answer_is_an_error(made: Made, policy: Policy) -> None:
    tail = "    def reward(completions, **columns):\n        return [1.0]\n"
    results = outcomes(made(GAME + tail), 2)
    assert all("reward returned 1 rewards, but there are 2" in str(one.error) for one in results)
    silent = made("def rollout_func(prompts, trainer): return {'prompt_ids': [[1]], 'completion_ids': [[2]], "
                  "'logprobs': None, 'env_reward': [1.0]}\n")  # fmt: skip
    assert "asked the policy for no answer" in str(outcomes(silent)[0].error)


@pytest.mark.parametrize("use", ["asyncio.run", "asyncio.get_event_loop().run_until_complete"])
def test_rewards_may_run_coroutines_themselves(made: Made, policy: Policy, use: str) -> None:
    environment = made(
        f"""
        import asyncio
        async def judged(values):
            await asyncio.sleep(0)
            return values
        def rollout_func(prompts, trainer):
            return one(asked(trainer, prompts[0]), env_reward=0.5)
        def reward(completions, env_reward, **columns):
            return {use}(judged(env_reward))
        """
    )
    assert [(one.reward, one.error) for one in outcomes(environment, 2)] == [(0.5, None)] * 2


def test_fields_that_are_no_lists_reach_the_rewards_whole(made: Made, policy: Policy) -> None:
    environment = made(
        """
        import numpy
        def rollout_func(prompts, trainer):
            return one(asked(trainer, prompts[0])) | {"scores": numpy.array([0.25, 0.5])}
        def reward(completions, scores, **columns):
            return [float(each.max()) for each in scores]
        """
    )
    assert [(one.reward, one.error) for one in outcomes(environment, 2)] == [(0.5, None)] * 2


def test_a_group_is_sampled_by_a_worker(made: Made) -> None:
    environment = made(GAME)
    source = {"adapter": "trl", "target": json.dumps(environment._target)}

    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        async with await WorkerClient.start(timeout=60) as link:
            card = await link.call("open", source=source, timeout=120)
            with scripted_session("four") as session:
                given = {**vars(session), "stop": []}
                return card, await link.call("run", split="train", index=0, sessions=[given] * 3, timeout=60)

    card, group = asyncio.run(main())
    assert card["own_loop"] and card["takes_turns"] and card["parts"].keys() == {"reward"}
    assert [one["reward"] for one in group["outcomes"]] == [3.0] * 3, group
    assert [one["turns"] for one in group["outcomes"]] == [3] * 3 and group["talks"] == [[]] * 3


def test_nothing_of_a_script_stays_in_place_of_modules_after_a_rollout(made: Made, policy: Policy) -> None:
    import sys

    environment = made(GAME)
    before, argv = set(sys.modules), list(sys.argv)
    assert outcomes(environment, 2)[0].error is None
    assert not [name for name in set(sys.modules) - before if name.startswith("trl.experimental.openenv")]
    assert sys.argv == argv and sys.modules["__main__"] is not environment._user.module
    limit = time.monotonic() + 5
    while any(thread.name == "rollout" for thread in threading.enumerate()):
        assert time.monotonic() < limit


def test_groups_of_several_tasks_run_beside_each_other(made: Made, policy: Policy) -> None:
    environment = configure(made(GAME))
    policy.delay_s = 0.01

    async def main() -> list[Any]:
        groups = [
            sample_group(environment, task_of(environment, number), [session_of(n) for n in range(2)])
            for number in range(3)
        ]
        return [one for group in await asyncio.gather(*groups) for one in group.outcomes]

    assert [(one.reward, one.error) for one in asyncio.run(main())] == [(3.0, None)] * 6
