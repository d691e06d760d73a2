"""The trainer that a rollout function gets: its tokenizer and settings, and ways to the policy of one rollout.

`generate_rollout_completions(trainer, prompts)` and `trainer.vllm_generation.generate(...)` ask the policy's server by
chat, because it alone knows the policy's template. So prompts are read back from ChatML, which the tokenizer of bytes
writes; any other text is a message of the user. Ids of tokens are bytes, their log-probabilities 0: training uses what
the server recorded.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from toprope.sdk.adapters._shared.chatml import messages_in
from toprope.sdk.adapters._shared.rows import chat_of, is_chat
from toprope.sdk.adapters._trl.arguments import Settings
from toprope.sdk.adapters._trl.placeholders import GENERATE, Policy
from toprope.sdk.authoring.env_managed import Session
from toprope.sdk.authoring.environment import Messages
from toprope.sdk.authoring.policy_client import PolicyRefused, ask
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["NoAnswer", "StandIn", "Talk"]

_MOST_EMPTY = 200
"""Empty answers in a row after which a rollout ends, though its script plays on."""
_PASSED_ON = ("top_p", "temperature", "stop", "seed", "presence_penalty", "frequency_penalty")
"""Settings of vLLM that requests to the policy's server have, too."""


class NoAnswer(BaseException):
    """The policy gives no answer. Not an Exception, so that handlers of a script do not play on without one."""


@dataclass(frozen=True)
class Answer:
    """An answer of the policy; `is_cut` at the limit of tokens."""

    text: str
    is_cut: bool


class Talk:
    """The requests of one rollout, made in the thread of its script.

    Args:
        session: The rollout's access to the policy.
        loop: The event loop that sends the requests.
        most: Most answers.
    """

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self.session = session
        self.turns, self.truncated = 0, False
        self.failure: Exception | None = None
        """The first reason for which the script got no answer; it may have handled that as an error of its own."""
        self._loop, self._most, self._empty = loop, most, 0
        self._asked: set[Future[Answer]] = set()
        self._lock = threading.Lock()

    def fail(self, error: Exception) -> None:
        """Note that the script gets no answer from here on."""
        with self._lock:
            self.failure = self.failure or error
            asked = list(self._asked)
        for future in asked:
            future.cancel()

    def answers(self, talks: Sequence[Messages], **options: Any) -> list[Answer]:
        """Return the policy's answers to several conversations.

        Raises:
            NoAnswer: No answer came, or the rollout is over.
        """
        futures: list[Future[Answer]] = []
        try:
            for messages in talks:
                with self._lock:
                    if self.failure is not None:
                        raise self.failure
                    futures.append(asyncio.run_coroutine_threadsafe(self._answer(messages, options), self._loop))
                    self._asked.add(futures[-1])
            return [future.result() for future in futures]
        except Exception as error:
            self.fail(error)
            raise NoAnswer(str(self.failure)) from None
        finally:
            with self._lock:
                self._asked.difference_update(futures)

    async def _answer(self, messages: Messages, options: Mapping[str, Any]) -> Answer:
        """Ask once. Out of answers or of context, the policy says nothing, as vLLM then does: the game goes on."""
        if self.turns < self._most:
            try:
                said = await ask(self.session, messages, **options)
            except PolicyRefused as refusal:
                if not (self.turns and refusal.is_full):
                    raise
            else:
                self.turns, self._empty = self.turns + 1, 0
                self.truncated = said.get("finish_reason") == "length"
                return Answer(str(said.get("content") or ""), self.truncated)
        self._empty, self.truncated = self._empty + 1, True
        if self._empty > _MOST_EMPTY:
            raise EnvironmentMistake(
                f"the policy has no room or no turns left, and the script asked it {self._empty} times more: it must "
                "end a game in which answers are empty"
            )
        return Answer("", True)


class StandIn:
    """The trainer as a rollout function knows it.

    Args:
        talk: The requests of the rollout.
        passed: The `args` that the script passes to its trainer.
        tokenizer: Its `processing_class`.
        number: The number of the task, in place of the training step: equal within a group.
    """

    _is_vlm = False
    use_vllm, vllm_mode, generation_batch_size = True, "colocate", 1
    num_generations = num_generations_eval = 1

    def __init__(self, talk: Talk, passed: Any, tokenizer: Any, number: int) -> None:
        self._talk = talk
        self.processing_class = tokenizer
        self.args = settings = Settings() if passed is None else copy.copy(passed)
        given: dict[str, Any] = {
            **{"num_generations": 1, "num_generations_eval": 1, "use_vllm": True, "vllm_mode": "colocate"},
            **{"per_device_train_batch_size": 1, "generation_batch_size": 1},
            **{"temperature": talk.session.temperature, "max_completion_length": talk.session.max_tokens},
        }
        for name, value in given.items():
            setattr(settings, name, value)
        self.temperature, self.max_completion_length = talk.session.temperature, talk.session.max_tokens
        self.state = SimpleNamespace(global_step=number, epoch=0.0, max_steps=-1)
        self.model = self.model_wrapped = Policy()
        self.accelerator = SimpleNamespace(
            is_main_process=True, is_local_main_process=True, device="cpu", process_index=0, local_process_index=0,
            num_processes=1, unwrap_model=lambda model, *options, **named: model, print=print,
            wait_for_everyone=lambda: None,
        )  # fmt: skip
        self.vllm_generation = SimpleNamespace(
            generate=self._generate, sync_weights=lambda: None, mode="colocate", **self._limits()
        )

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("args")
        if not name.startswith("_") and settings is not None and (value := getattr(settings, name, None)) is not None:
            return value  # of which TRL copies some
        raise AttributeError(f"TRL's trainer has no {name!r} here; a rollout function asks the policy by {GENERATE}")

    def fail(self, error: Exception) -> None:
        """Note that the script got no answer, of which it may make anything."""
        self._talk.fail(error)

    def completions(self, prompts: Any, overrides: Any = None) -> list[dict[str, Any]]:
        """Do what TRL's `generate_rollout_completions` does.

        Args:
            prompts: Texts, messages or ids of tokens; one prompt may stand alone.
            overrides: Settings of vLLM for these requests.
        """
        if isinstance(prompts, str) or is_chat(prompts):
            prompts = [prompts]
        options = self._options(overrides)
        try:
            talks = [self._messages(prompt) for prompt in prompts]
        except Exception as error:
            self._talk.fail(error)
            raise NoAnswer(str(error)) from error
        made = []
        for prompt, messages, answer in zip(prompts, talks, self._talk.answers(talks, **options), strict=True):
            ids = self._ids(answer)
            text = prompt if isinstance(prompt, str) else self._rendered(messages)
            prompt_ids = self._encoded(text)
            made.append(
                {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [0.0] * len(ids), "text": answer.text}
            )
        return made

    def _generate(
        self, prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Do what `vllm_generation.generate` does, which gets each prompt as often as it has answers."""
        made = self.completions([list(ids) for ids in prompts])
        ids = [answer["completion_ids"] for answer in made]
        return (
            [list(prompt) for prompt in prompts],
            ids,
            [[[0.0] for _ in answer] for answer in ids],
            [[[token] for token in answer] for answer in ids],
        )

    def _limits(self) -> dict[str, Any]:
        session = self._talk.session
        return {
            "temperature": session.temperature, "top_p": session.top_p, "max_completion_length": session.max_tokens
        }  # fmt: skip

    def _options(self, overrides: Any) -> dict[str, Any]:
        overrides = dict(overrides or {})
        options = {name: overrides[name] for name in _PASSED_ON if overrides.get(name) is not None}
        limit = next((overrides[name] for name in ("max_tokens", "max_new_tokens") if overrides.get(name)), None)
        if limit is not None:
            options["max_tokens"] = min(int(limit), self._talk.session.max_tokens)
        return options

    def _messages(self, prompt: Any) -> Messages:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
        if is_chat(prompt):
            return [{**message} for message in chat_of(prompt, "A prompt")]
        text = prompt if isinstance(prompt, str) else str(self.processing_class.decode(list(prompt)))
        messages, begun = messages_in(text)
        if begun:
            raise EnvironmentMistake(
                f"The prompt begins the policy's answer with {begun[:40]!r}. The policy is asked by chat, in which it "
                "begins its answers itself: leave that out."
            )
        return messages

    def _rendered(self, messages: Messages) -> str:
        return str(self.processing_class.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _encoded(self, text: str) -> list[int]:
        return list(self.processing_class(text, add_special_tokens=False)["input_ids"])

    def _ids(self, answer: Answer) -> list[int]:
        ids = self._encoded(answer.text)
        return ids if answer.is_cut else [*ids, self.processing_class.eos_token_id]
