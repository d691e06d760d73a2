"""Training and sampling at a service that speaks Tinker's interface: the section `trainer`, what it excludes, and the
owner's prices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

from toprope.settings.endpoints import BASE
from toprope.settings.sections.environment import RUN, Section

TINKER = "tinker"
KEY, ADDRESS = "TINKER_API_KEY", "TINKER_BASE_URL"
"""Variables of the owner's settings for the component `trainer`; inference gets them too, and nobody else."""


class TrainerSection(Section):
    """Where the policy is trained and sampled."""

    backend: Literal["local", "tinker"] = Field(
        "local",
        description="local: by the run's own processes. tinker: at a service with Tinker's interface, by LoRA; nothing "
        "on this machine then needs torch or a GPU.",
    )
    loss: Literal["importance_sampling", "ppo", "cispo"] = Field(
        "importance_sampling",
        description="For tinker: the service's loss on groups, averaged over tokens. ppo and cispo clip the ratio at "
        "1 - algorithm.epsilon and 1 + algorithm.epsilon_high. Demonstrations use cross_entropy.",
    )


class HostedPrices(BaseModel, extra="forbid", frozen=True):
    """A service's prices of one model."""

    prompt_usd: float = Field(ge=0)
    """US dollars per million tokens of prompts."""
    completion_usd: float = Field(ge=0)
    """US dollars per million sampled tokens."""
    train_usd: float = Field(ge=0)
    """US dollars per million tokens of sequences that are trained on."""
    step_usd: float = Field(0.0, ge=0)
    """US dollars per optimizer step."""

    def of_sampling(self, prompt: int, completion: int) -> float:
        """USD for one answer, in tokens."""
        return (prompt * self.prompt_usd + completion * self.completion_usd) / 1e6

    def of_step(self, tokens: int) -> float:
        """USD for an optimizer step on sequences of so many tokens together."""
        return tokens * self.train_usd / 1e6 + self.step_usd


class TinkerSettings(BaseModel, extra="forbid"):
    """The owner's account at a service."""

    prices: dict[str, HostedPrices] = Field(default_factory=dict)
    """By the name of the model at the service."""


def hosted_conflicts(value: Callable[[str], Any]) -> list[str]:
    """Sentences about fields that a service cannot follow; empty if the run trains on this machine.

    Args:
        value: Returns a field's value by its name.
    """
    if value("trainer.backend") != TINKER:
        return []
    wanted = {
        "policy.lora": (True, "services train adapters only"),
        "policy.lora_alpha": (32.0, "services have no such setting"),
        "policy.load_in_4bit": (False, "the service holds the weights"),
        "policy.load_in_8bit": (False, "the service holds the weights"),
        "policy.lora_dropout": (0.0, "services have no such setting"),
        "policy.lora_target_modules": ("all-linear", "services adapt all layers"),
        "algorithm.loss_type": ("dapo", "trainer.loss names the service's loss"),
        "algorithm.beta": (0.0, "services have no KL term"),
        "algorithm.importance_sampling_level": ("token", "ratios are by token"),
        "algorithm.importance_sampling_mode": ("none", "services clip the ratio to the sampler"),
        "algorithm.deterministic": (False, "nobody can promise it of a service"),
        "optimizer.precision": ("auto", "the service computes"),
        "optimizer.eight_bit": (False, "the service has the optimizer"),
        "rollout.temperature": (1.0, "the service trains at temperature 1"),
        "rollout.top_p": (1.0, "the service trains on all tokens"),
        "inference.engine": ("embedded", "the service samples"),
        "inference.sleep": (False, "the service samples"),
        "launcher.nodes": (1, "nothing here computes"),
        "launcher.num_processes": (1, "nothing here computes"),
        "launcher.inference_gpus": (0, "nothing here computes"),
    }
    problems = [
        f"{name} is {value(name)}; with trainer.backend tinker it must be {right}: {why}."
        for name, (right, why) in wanted.items()
        if value(name) != right
    ]
    model, algorithm, opponent = value("policy.model"), value("algorithm.name"), value("environment.opponent")
    if model.startswith("embedded"):
        problems.append(f"policy.model is {model}, which is made on this machine; name a model of the service.")
    if algorithm not in ("grpo", "sft"):
        problems.append(
            f"algorithm.name is {algorithm}; with trainer.backend tinker it is grpo, with the loss in "
            "trainer.loss (importance_sampling, ppo, cispo), or sft."
        )
    if value("launcher.device") == "cuda":
        problems.append("launcher.device is cuda; with trainer.backend tinker the service computes: set it to auto.")
    if opponent == BASE or opponent.startswith(RUN):
        problems.append("environment.opponent needs a second policy here, which trainer.backend tinker does not have.")
    return problems
