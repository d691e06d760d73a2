"""The configuration of a run: one model, sections with dotted names (`optimizer.learning_rate`).

Names follow TRL and Hugging Face where they have one. Every field has a default that works on a laptop without a GPU,
a description that an agent reads, and bounds that exclude nonsense; the owner's locks narrow them further. What spans
several fields is checked in `Config.conflicts`, so that an edit of two fields at once is judged by its result.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from toprope.settings.algorithms import contradictions
from toprope.settings.mixing import mismatches, plain_curriculum, plain_mixture, plain_rewards

__all__ = ["EMBEDDED", "Config", "SECTIONS"]

EMBEDDED = ("embedded", "embedded-tools")
"""Policies that are made on the spot; see toprope.training.policy.tiny_model."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class EnvironmentSection(_Section):
    """What is trained on."""

    name: str = Field("", description="The environment, as list_environments names it. Set by select_environment.")
    knobs: dict[str, Any] = Field(
        default_factory=dict, description="The environment's own settings; describe_environment lists them."
    )
    reward_weights_end: dict[str, float] = Field(
        default_factory=dict,
        description="Weights that reward parts have after the last step; they move there along a line. Parts not named "
        "here keep theirs.",
    )
    reward_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weight of each named reward part; parts not named here keep the environment's own weight.",
    )
    max_turns: int = Field(10, ge=1, le=1000, description="Turns after which a multi-turn rollout is cut off.")
    load_timeout_s: float = Field(120.0, gt=0, le=3600, description="Seconds the environment may take to load.")
    call_timeout_s: float = Field(60.0, gt=0, le=3600, description="Seconds one call into the environment may take.")
    rollout_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Seconds one rollout may take of an environment that plays its rollouts itself.",
    )
    memory_mb: int = Field(
        0,
        ge=0,
        le=16_777_216,
        description="Memory that the environment's worker may have with all it started, in MB; beyond it is started "
        "again and what it was at is given up. 0: no limit.",
    )
    network: Literal["allow", "deny"] = Field(
        "allow", description="deny: the environment gets no network. Refused where this machine cannot hold it to that."
    )
    unchecked_reason: str = Field(
        "",
        max_length=500,
        description="Why to train although answers right and wrong earn the same; without it such a run is refused.",
    )
    rewards: Annotated[list[Any], AfterValidator(plain_rewards)] = Field(
        default_factory=list,
        description="More reward parts, by functions in the owner's environment folders: {name, weight, fn: "
        "'file.py:function', low, high}. Success stays the environment's own.",
    )
    curriculum: Annotated[dict[str, Any], AfterValidator(plain_curriculum)] = Field(
        default_factory=dict,
        description="Moves a knob as validation tasks are solved: {knob, levels, success, min_steps, window, "
        "earlier_share, measured_level}.",
    )
    mixture: Annotated[list[Any], AfterValidator(plain_mixture)] = Field(
        default_factory=list,
        description="Environments trained on beside this one: {name, label, weight, min_share, knobs, reward_weights, "
        "reward_weights_end, max_turns, rewards, curriculum}. Each is evaluated on as many tasks as this one.",
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="In a mixture: this environment's share, relative to others'.")
    min_share: float = Field(0.0, ge=0, lt=1, description="In a mixture: share of groups that it never falls below.")


class PolicySection(_Section):
    """The model that is trained."""

    model: str = Field(
        "embedded",
        min_length=1,
        description="'embedded' (a tiny policy made on this machine), 'embedded-tools' (another, for the orchestrator, "
        "that knows nothing yet), a Hugging Face model id, a folder, or 'run:<run_id>': what that run left.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the weights; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    max_context: int = Field(512, ge=8, le=1_048_576, description="Longest prompt plus answer, in tokens.")
    lora: bool = Field(False, description="Train low-rank adapters instead of all weights.")
    lora_rank: int = Field(16, ge=1, le=1024, description="Rank of the adapters.")
    lora_alpha: float = Field(32.0, gt=0, le=4096, description="Scale of the adapters.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout within the adapters, while training.")
    lora_target_modules: str = Field(
        "all-linear", description="Modules that get adapters: 'all-linear' or names separated by commas."
    )


class AlgorithmSection(_Section):
    """How rewards become a loss. Names and meanings are TRL's GRPOConfig."""

    name: Literal[
        "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "luspo", "sapo", "vespo", "rloo", "ppo", "sft", "custom"
    ] = Field(
        "grpo",
        description="grpo: reinforcement learning from the environment's reward, its form by the fields below; dr_grpo "
        "to rloo: forms of it by name, which set those fields. ppo: with a value function, by the section ppo. sft: "
        "supervised fine-tuning on demonstrations, by the section sft. custom: the class that trainer names.",
    )
    trainer: str = Field(
        "", description="For custom: 'file.py:Class' in a folder that the owner named under trainers in settings.yaml."
    )
    trainer_settings: dict[str, Any] = Field(default_factory=dict, description="For custom: the class's own settings.")
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = Field(
        "dapo", description="How token losses are formed and averaged."
    )
    beta: float = Field(0.0, ge=0, le=10, description="Weight of the KL term against the starting policy; 0: none.")
    reference_8bit: bool = Field(
        False,
        description="The KL term's starting policy in 8 bits (bitsandbytes, an NVIDIA GPU). Nothing changes with LoRA, "
        "where it is no second model, nor without beta.",
    )
    epsilon: float = Field(0.2, gt=0, lt=10, description="Lower clip range of the importance ratio.")
    epsilon_high: float = Field(0.28, gt=0, lt=100, description="Upper clip range of the importance ratio.")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="Divide advantages by the standard deviation of the group, of the batch, or not."
    )
    baseline: Literal["group", "leave_one_out"] = Field(
        "group", description="What an answer's reward is held against: its group's mean, or the mean of the others'."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="Importance ratios by token, or by sequence (GSPO)."
    )
    mask_truncated_completions: bool = Field(False, description="Leave answers that were cut off out of the loss.")
    drop_zero_signal: bool = Field(
        True,
        description="Pass over groups whose rewards are all equal (DAPO's dynamic sampling); they are counted. ppo and "
        "custom never do: there they teach.",
    )
    shuffle_rewards: bool = Field(
        False, description="A control: rewards are shuffled within each group, so that nothing can be learned."
    )
    deterministic: bool = Field(
        False,
        description="Two runs give the same numbers, on the same machine and versions: sampling waits for each step's "
        "weights, one rollout group at a time, with fixed seeds. Several times slower.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of sampling, tasks' order and weights' init.")


class OptimizerSection(_Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0, le=1, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        "constant_with_warmup", description="How the rate moves over the run."
    )
    warmup_steps: int = Field(5, ge=0, le=100_000, description="Steps over which the rate rises from 0.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, le=1000, description="Gradients are scaled down to this norm.")
    micro_batch_size: int = Field(
        0, ge=0, le=65536, description="Sequences per forward and backward pass; 0: the whole batch at once."
    )
    gradient_checkpointing: bool = Field(False, description="Trade time for memory in the backward pass.")
    eight_bit: bool = Field(False, description="AdamW's moments in 8 bits (bitsandbytes, an NVIDIA GPU).")


class PpoSection(_Section):
    """Proximal policy optimization (algorithm.name ppo)."""

    gamma: float = Field(1.0, gt=0, le=1, description="Discount from one sampled token to the next.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="How far advantages look ahead: 1 to the reward itself, 0 to the next value."
    )
    clip_range: float = Field(0.2, gt=0, lt=10, description="Clip range of the importance ratio, both ways.")
    value_coef: float = Field(0.1, ge=0, le=100, description="Weight of the value loss.")
    value_clip_range: float = Field(
        0.2, ge=0, le=1e6, description="How far a value may move on one batch, in units of reward; 0: not limited."
    )
    value_learning_rate: float | None = Field(
        None, gt=0, le=1, description="Peak rate of the value head; null: optimizer.learning_rate."
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Weight of the KL penalty against the starting policy, taken off the reward token by token; 0: "
        "none, and no second model in memory.",
    )
    entropy_coef: float = Field(0.0, ge=0, le=10, description="Weight of the entropy bonus.")
    epochs: int = Field(2, ge=1, le=100, description="Passes over each batch.")
    minibatches: int = Field(1, ge=1, le=1024, description="Optimizer updates in each pass.")
    whiten_advantages: bool = Field(True, description="Advantages of a batch get mean 0 and deviation 1.")


class SftSection(_Section):
    """Supervised fine-tuning on demonstrations (algorithm.name sft). Names are TRL's SFTConfig's where it has them."""

    teacher: str = Field(
        "solver",
        min_length=1,
        description="Who demonstrates: 'solver' (the environment's own), or a model that the owner named.",
    )
    dataset: str = Field(
        "", max_length=80, description="A data set to learn from instead of a teacher: 'best@v2', 'best': the newest."
    )
    tasks: int = Field(256, ge=1, le=1_000_000, description="Training tasks that are demonstrated.")
    traces_per_task: int = Field(2, ge=1, le=64, description="Demonstrations of each task.")
    attempts: int = Field(3, ge=1, le=64, description="Tries at a demonstration; only right ones are kept.")
    temperature: float = Field(0.7, ge=0, le=5, description="Sampling temperature of a model that demonstrates.")
    max_new_tokens: int = Field(1024, ge=1, le=131_072, description="Longest answer of a model that demonstrates.")
    regenerate: bool = Field(False, description="Collect anew instead of using what was collected before.")
    epochs: int = Field(3, ge=1, le=1000, description="Passes over the demonstrations.")
    batch_size: int = Field(8, ge=1, le=65536, description="Conversations a step.")
    learning_rate: float = Field(2e-5, gt=0, le=1, description="Peak learning rate; it falls to 0 along a line.")
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps over which the rate rises from 0.")
    weight_decay: float = Field(0.01, ge=0, le=1, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, le=1000, description="Gradients are scaled down to this norm.")
    max_length: int = Field(4096, ge=8, le=1_048_576, description="Longest conversation, in tokens.")
    save_epochs: int = Field(1, ge=1, le=1000, description="Passes between checkpoints; there is always a last one.")


class RolloutSection(_Section):
    """How answers are sampled and queued."""

    group_size: int = Field(8, ge=2, le=1024, description="Answers per task (TRL: num_generations).")
    groups_per_step: int = Field(8, ge=1, le=4096, description="Groups per optimizer step.")
    max_new_tokens: int = Field(256, ge=1, le=131_072, description="Longest answer of one turn, in tokens.")
    temperature: float = Field(1.0, gt=0, le=5, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    stop: list[str] = Field(default_factory=list, max_length=8, description="Texts that end an answer.")
    max_staleness: int = Field(
        8, ge=0, le=1024, description="Groups sampled by a policy older than this many versions are dropped."
    )
    unmatched: Literal["drop", "train"] = Field(
        "drop",
        description="Groups that an outside environment posts and whose tokens inference did not sample as they are, "
        "so that their policy version is unknown. They are counted either way.",
    )
    queue_groups: int = Field(
        8, ge=1, le=65536, description="Groups that may wait for the trainer; then sampling pauses."
    )
    concurrency: int = Field(16, ge=1, le=4096, description="Groups in the making at the same time.")


class EvaluationSection(_Section):
    """What is measured before and after. The held-out split is sealed: only these reports see it."""

    heldout_tasks: int = Field(200, ge=0, le=100_000, description="Held-out tasks, before and after training.")
    validation_tasks: int = Field(
        64, ge=1, le=100_000, description="Validation tasks for test_inference by default, and for every_steps."
    )
    every_steps: int = Field(
        0, ge=0, le=1_000_000, description="Also evaluate on validation tasks every so many steps; 0: not."
    )
    greedy: bool = Field(True, description="Also measure with the most likely token at each position.")
    examples: int = Field(6, ge=0, le=100, description="Validation tasks whose answers are kept, before and after.")


class LoggingSection(_Section):
    """What a run leaves behind."""

    wandb: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="Weights & Biases; online needs WANDB_API_KEY in the owner's settings."
    )
    wandb_project: str = Field("toprope", min_length=1, description="Its project.")
    save_steps: int = Field(
        500, ge=1, le=1_000_000, description="Steps between checkpoints; there is always a last one."
    )
    journal_sync: Literal["always", "group", "os"] = Field(
        "group",
        description="When a rollout counts as stored. group: on disk, many at once; always: on disk, one by one; os: "
        "with the operating system, which survives every crash but the machine's own.",
    )
    keep_rollouts: bool = Field(
        True, description="Keep all rollouts with the run; false: remove those that a checkpoint has passed."
    )
    save_total_limit: int = Field(2, ge=1, le=1000, description="Checkpoints that are kept.")


class LauncherSection(_Section):
    """Where the crew runs."""

    kind: Literal["local"] = Field("local", description="On this machine.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: a GPU where there is one. A run has a GPU to itself and is queued until one is free.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=256,
        description="CPU threads of each torch process. Training on the CPU reserves twice as many, for trainer and "
        "inference, and is queued until they are free; tests run beside training and are queued behind tests only.",
    )
    start_timeout_s: float = Field(600.0, gt=0, le=86_400, description="Seconds until every component must be ready.")
    stop_grace_s: float = Field(
        4.0,
        ge=0,
        le=600,
        description="Seconds the trainer gets for a last checkpoint at a stop; others get at most 2 to end in order.",
    )
    stall_after_s: float = Field(
        300.0,
        ge=0,
        le=604_800,
        description="Seconds without a step, or without progress where there are none, after which a run that lives is "
        "said to stand still; 0: never.",
    )
    stall_after_steps: float = Field(
        10.0, ge=1, le=10_000, description="As many usual steps must have passed as well: the median of the last 100."
    )
    resume_lost: Literal["auto", "never"] = Field(
        "auto",
        description="A training run whose keeper is gone (killed, machine restarted) goes on from its newest "
        "checkpoint as soon as a server or command looks; never: it stays lost until resume_training.",
    )
    resume_lost_limit: int = Field(
        3, ge=0, le=1000, description="Times that it does so in a row without a new checkpoint in between."
    )
    resume_lost_backoff_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds before the second time in a row; doubled for each after it."
    )
    restarts: int = Field(
        3,
        ge=0,
        le=100,
        description="Times that each component, and the environment's worker, is started again in place within "
        "restart_window_s when it dies or hangs; one more ends the run. 0: the first ends it.",
    )
    restart_window_s: float = Field(3600.0, gt=0, le=604_800, description="Seconds over which restarts are counted.")
    restart_backoff_s: float = Field(
        0.5, ge=0, le=600, description="Seconds before the first restart in the window; doubled for each after it."
    )
    hang_timeout_s: float = Field(
        120.0,
        ge=1,
        le=86_400,
        description="Seconds without a sign of life after which api, inference or environment counts as hung.",
    )
    trainer_hang_timeout_s: float = Field(
        1800.0, ge=1, le=86_400, description="The same for the trainer, which is silent within a forward or backward."
    )


class BudgetSection(_Section):
    """How far a run may go."""

    steps: int = Field(1000, ge=1, le=10_000_000, description="Optimizer steps.")
    max_train_seconds: float | None = Field(
        None, gt=0, description="Training ends in order after so many seconds, whatever the step; null: no limit."
    )


class Config(BaseModel):
    """The whole configuration."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    policy: PolicySection = Field(default_factory=PolicySection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    sft: SftSection = Field(default_factory=SftSection)
    ppo: PpoSection = Field(default_factory=PpoSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    launcher: LauncherSection = Field(default_factory=LauncherSection)
    budget: BudgetSection = Field(default_factory=BudgetSection)

    def conflicts(self) -> list[str]:
        """Sentences about fields that do not fit each other; empty when the configuration is consistent."""
        found = mismatches(self.environment)
        rollout, policy = self.rollout, self.policy
        if rollout.max_new_tokens >= policy.max_context:
            found.append(
                f"rollout.max_new_tokens ({rollout.max_new_tokens}) leaves no room for a prompt within "
                f"policy.max_context ({policy.max_context})."
            )
        sequences = rollout.group_size * rollout.groups_per_step
        micro = self.optimizer.micro_batch_size
        if micro and sequences % micro:
            found.append(
                f"optimizer.micro_batch_size ({micro}) does not divide the batch of rollout.group_size x "
                f"rollout.groups_per_step = {sequences} sequences."
            )
        if self.optimizer.warmup_steps > self.budget.steps:
            found.append(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) exceeds budget.steps ({self.budget.steps})."
            )
        if self.algorithm.epsilon_high < self.algorithm.epsilon and self.algorithm.loss_type != "sapo":
            found.append(
                f"algorithm.epsilon_high ({self.algorithm.epsilon_high}) is below algorithm.epsilon "
                f"({self.algorithm.epsilon})."
            )
        algorithm = self.algorithm
        values = {f"algorithm.{name}": getattr(algorithm, name) for name in AlgorithmSection.model_fields}
        found += contradictions(algorithm.name, values)
        if (algorithm.name == "custom") != bool(algorithm.trainer):
            found.append(
                "algorithm.name custom needs algorithm.trainer, such as 'reinforce.py:Reinforce'."
                if algorithm.name == "custom"
                else f"algorithm.trainer is for algorithm.name custom; the name is {algorithm.name}."
            )
        return found


SECTIONS: tuple[str, ...] = tuple(Config.model_fields)
