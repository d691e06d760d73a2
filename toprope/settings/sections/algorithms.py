"""The registry of algorithms: the fields that each name sets, its source, and the class that trains.

The schema, drafts, presets, the trainer's program and the documentation all read it. A name of the GRPO family is an
alias: it fixes the fields that define the method in its paper (`means`) and proposes other values that the paper uses
(`advises`), which may be edited. `grpo` fixes none, so every field can be set by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NAME = "algorithm.name"
"""The field that names an algorithm."""

_GROUPS = "toprope.training.trainer.grpo:GrpoRun"
"""The losses of the GRPO family on delivered groups."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    Args:
        name: Value of `algorithm.name`.
        summary: One sentence.
        source: Paper or specification.
        program: Class that trains, as `module:Class`; only the trainer's process imports it.
        means: Values that define the method, by dotted field.
        advises: Values that its paper uses; set together with the name, and editable afterwards.
        spread: Whether it learns nothing from groups whose rewards are all equal.
    """

    name: str
    summary: str
    source: str
    program: str = _GROUPS
    means: Mapping[str, Any] = field(default_factory=dict)
    advises: Mapping[str, Any] = field(default_factory=dict)
    spread: bool = True


def _loss(loss_type: str, *, level: str = "token", scale: str = "group", **advises: Any) -> dict[str, Any]:
    means = {
        "algorithm.loss_type": loss_type,
        "algorithm.importance_sampling_level": level,
        "algorithm.scale_rewards": scale,
        "algorithm.baseline": "group",
    }
    return {"means": means, "advises": {f"algorithm.{name}": value for name, value in advises.items()}}


_ALL = (
    Algorithm(
        "grpo",
        "Advantages relative to a task's group of answers, no value function; algorithm.loss_type and the other fields "
        "choose the form.",
        "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
        # Undo what another name set; loss_type stays as it is.
        advises={
            "algorithm.importance_sampling_level": "token",
            "algorithm.scale_rewards": "group",
            "algorithm.baseline": "group",
            "algorithm.epsilon": 0.2,
            "algorithm.epsilon_high": 0.28,
        },
    ),
    Algorithm(
        "dr_grpo",
        "GRPO without the division by length and by the group's deviation, which favour long wrong answers and tasks "
        "of extreme difficulty.",
        "Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783",
        **_loss("dr_grpo", scale="none", epsilon=0.2, epsilon_high=0.28),
    ),
    Algorithm(
        "dapo",
        "Every token counts the same, the upper clip range is wider, groups without signal are passed over.",
        "Yu et al. 2025, DAPO, arXiv:2503.14476",
        **_loss("dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0),
    ),
    Algorithm(
        "bnpo",
        "Another name of dapo's loss: all passes of a step are averaged together, while TRL's bnpo averages each.",
        "TRL 1.16, GRPOConfig.loss_type bnpo",
        **_loss("bnpo", epsilon=0.2, epsilon_high=0.28),
    ),
    Algorithm(
        "cispo",
        "The importance weight is clipped and not the token's loss, so that rare decisive tokens keep their gradient.",
        "MiniMax 2025, MiniMax-M1, arXiv:2506.13585; the clip of 5: Khatri et al. 2025, ScaleRL, arXiv:2510.13786",
        **_loss("cispo", epsilon_high=5.0),
    ),
    Algorithm(
        "gspo",
        "One importance ratio for a whole answer, the geometric mean of its tokens'; made for mixtures of experts.",
        "Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
        **_loss("grpo", level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    ),
    Algorithm(
        "luspo",
        "GSPO with each answer's loss scaled by its length, which takes out the pull towards short answers.",
        "Length-Unbiased Sequence Policy Optimization 2026, arXiv:2602.05261",
        **_loss("luspo", level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    ),
    Algorithm(
        "sapo",
        "A smooth gate in place of the clip: tokens far from the sampler's policy fade out.",
        "Soft Adaptive Policy Optimization 2025, arXiv:2511.20347",
        **_loss("sapo"),
    ),
    Algorithm(
        "vespo",
        "A smooth weight by the whole answer's importance ratio in place of the clip.",
        "Variational Sequence-Level Soft Policy Optimization 2026, arXiv:2602.10693",
        **_loss("vespo"),
    ),
    Algorithm(
        "rloo",
        "REINFORCE with the mean of the task's other answers as the baseline and one importance ratio per answer; "
        "rewards are not scaled, and there is no KL term.",
        "Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740; TRL 1.16, RLOOTrainer with beta 0",
        means={
            "algorithm.loss_type": "rloo",
            "algorithm.importance_sampling_level": "sequence",
            "algorithm.scale_rewards": "none",
            "algorithm.baseline": "leave_one_out",
            "algorithm.beta": 0.0,
        },
        advises={"algorithm.epsilon": 0.2, "algorithm.epsilon_high": 0.2},
    ),
    Algorithm(
        "ppo",
        "A value head learns what to expect at every token; advantages are generalized, steps are clipped, each batch "
        "is used several times. The section ppo has its settings.",
        "Schulman et al. 2017, arXiv:1707.06347; GAE: Schulman et al. 2016, arXiv:1506.02438; per-token KL: Ouyang et "
        "al. 2022, InstructGPT, arXiv:2203.02155",
        program="toprope.training.trainer.ppo:PpoRun",
        spread=False,
    ),
    Algorithm(
        "sft",
        "Supervised fine-tuning on demonstrations; the section sft has its settings.",
        "TRL 1.16, SFTTrainer",
        program="toprope.training.trainer.sft:SftRun",
        spread=False,
    ),
    Algorithm(
        "custom",
        "A trainer class of the owner's own, named by algorithm.trainer.",
        "toprope.sdk.training",
        program="toprope.training.trainer.custom:CustomRun",
        spread=False,
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALL}
"""Every algorithm, by name."""


def implied_fields(
    values: Mapping[str, Any], allowed: Callable[[str, Any], bool] = lambda name, value: True
) -> dict[str, Any]:
    """The other fields that a change of `algorithm.name` sets, without those that are given explicitly.

    Args:
        values: Values that are set, by dotted field.
        allowed: Whether a field may have a value; advice that is not allowed is left out.
    """
    chosen = ALGORITHMS.get(str(values.get(NAME, "")).strip().lower())
    if chosen is None:
        return {}
    advice = {name: value for name, value in chosen.advises.items() if allowed(name, value)}
    return {name: value for name, value in {**advice, **chosen.means}.items() if name not in values}


def contradictions(name: str, values: Mapping[str, Any]) -> list[str]:
    """Sentences about fields that contradict the algorithm's name.

    Args:
        name: Name of an algorithm.
        values: The fields of a configuration, by dotted name.
    """
    chosen = ALGORITHMS[name]
    problems = [
        f"{field_name} is {values[field_name]}, and {NAME} {name} means {wanted}; with {NAME} grpo it is free."
        for field_name, wanted in chosen.means.items()
        if values[field_name] != wanted
    ]
    cap = values["algorithm.epsilon_high"]
    if chosen.program == _GROUPS and values["algorithm.loss_type"] == "cispo" and cap < 1:
        problems.append(
            f"algorithm.epsilon_high is {cap}, and algorithm.loss_type cispo caps the importance ratio itself there, "
            "which is 1 for fresh answers: set it to 5, or set another loss_type, such as dapo."
        )
    if name == "ppo" and (beta := values["algorithm.beta"]):
        problems.append(
            f"algorithm.beta is {beta:g}, and {NAME} ppo has its KL penalty in ppo.kl_coef: set that, and "
            "algorithm.beta to 0."
        )
    return problems
