"""The configuration of a run: one model, sections with dotted names (`optimizer.learning_rate`).

Names are those of TRL and Hugging Face if they have one. Every field has a default that works on a laptop without a
GPU, a description that agents read, and bounds that exclude nonsense; the owner's locks narrow them further.
`Config.conflicts` checks rules across several fields, so an edit of two fields at once is judged by its result.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from toprope.settings.field_types import template_variables
from toprope.settings.sections.algorithms import contradictions
from toprope.settings.sections.environment import EnvironmentSection, Section, members_of, mixture_conflicts
from toprope.settings.sections.hosted import TINKER, TrainerSection, hosted_conflicts
from toprope.settings.sections.launcher import LauncherSection

EMBEDDED = ("embedded", "embedded-tools")
"""Policies that are built when they are first used; see toprope.training.policy.tiny_model."""
LEAST_VALUE_RATE = 1e-5
"""Rate of a new value head whose policy learns slower, as in verl."""


class PolicySection(Section):
    """The model to train."""

    model: str = Field(
        "embedded",
        min_length=1,
        description="'embedded' (a tiny policy made on this machine), 'embedded-tools' (an untrained one for the "
        "orchestrator), a Hugging Face model id, a folder, or 'run:<run_id>' (the weights that this run trained; "
        "'run:<run_id>@<step>' those of an earlier checkpoint).",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hugging Face model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Number format of the weights; auto: float32 on a CPU, bfloat16 on a GPU. Without LoRA, the "
        "trainer's are float32.",
    )
    max_context: int = Field(512, ge=8, le=1_048_576, description="Longest prompt plus answer, in tokens.")
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(template_variables)] = Field(
        default_factory=dict,
        description='Variables of the chat template, such as {"enable_thinking": false}. Checkpoints keep them in '
        "their template, so what is served or exported reads prompts as training did. A run that begins with another "
        "run's weights has that run's variables, too.",
    )
    lora: bool = Field(False, description="Train low-rank adapters instead of all weights.")
    load_in_4bit: bool = Field(
        False, description="Keep the frozen weights below the adapters in 4 bits (QLoRA, NF4; needs bitsandbytes)."
    )
    load_in_8bit: bool = Field(False, description="The same in 8 bits (LLM.int8()).")
    lora_rank: int = Field(16, ge=1, le=1024, description="Rank of the adapters.")
    lora_alpha: float = Field(32.0, gt=0, le=4096, description="Scale of the adapters.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout within the adapters, while training.")
    lora_target_modules: str = Field(
        "all-linear", description="Modules that get adapters: 'all-linear' or names separated by commas."
    )


class AlgorithmSection(Section):
    """Settings that turn rewards into a loss. Names and meanings are those of TRL's GRPOConfig."""

    name: Literal[
        "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "luspo", "sapo", "vespo", "rloo", "ppo", "sft", "custom"
    ] = Field(
        "grpo",
        description="grpo: reinforcement learning from the environment's reward, in the form that the fields below "
        "choose; dr_grpo to rloo: named forms, which set those fields. ppo: with a value function (section ppo). sft: "
        "supervised fine-tuning on demonstrations (section sft). custom: the class in trainer.",
    )
    trainer: str = Field(
        "", description="For custom: 'file.py:Class' in a folder that the owner named under trainers in settings.yaml."
    )
    trainer_settings: dict[str, Any] = Field(default_factory=dict, description="For custom: the class's own settings.")
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "rloo"] = Field(
        "dapo", description="How token losses are formed and averaged."
    )
    beta: float = Field(0.0, ge=0, le=10, description="Weight of the KL term to the starting policy (ppo: kl_coef).")
    reference_8bit: bool = Field(
        False,
        description="Keep the starting policy of the KL term in 8 bits (bitsandbytes, an NVIDIA GPU). No effect with "
        "LoRA, which needs no second model, or without beta.",
    )
    epsilon: float = Field(0.2, gt=0, lt=10, description="Lower clip range of the importance ratio (ppo: clip_range).")
    epsilon_high: float = Field(
        0.28, gt=0, lt=100, description="Upper clip range of the ratio (ppo: clip_range); for cispo, the ratio's cap."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="Divide advantages by the standard deviation of the group or batch, or not; not for ppo."
    )
    baseline: Literal["group", "leave_one_out"] = Field(
        "group", description="Baseline of an answer's reward: the mean of its group, or of the group's other answers."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="Importance ratios by token, or by sequence (GSPO)."
    )
    importance_sampling_mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        Field(
            "none",
            description="none: epsilon clips the ratio to the sampler, however old. Otherwise it clips the ratio to "
            "the policy before the step, and a weight by token or answer corrects for the sampler: clamped to the "
            "bounds below (truncate), or 0 outside of them (mask). TRL's vllm_importance_sampling_mode; for the GRPO "
            "family but vespo.",
        )
    )
    importance_sampling_clip_max: float = Field(3.0, gt=0, le=1e6, description="Upper bound of that weight.")
    importance_sampling_clip_min: float = Field(0.0, ge=0, le=1e6, description="Lower bound of that weight.")
    mask_truncated_completions: bool = Field(False, description="Exclude answers that were cut off from the loss.")
    drop_zero_signal: bool = Field(
        True,
        description="Skip groups whose rewards are all equal (DAPO's dynamic sampling); they are counted. No effect "
        "for ppo and custom, which learn from them.",
    )
    shuffle_rewards: bool = Field(
        False, description="A control: rewards are shuffled within groups (ppo, custom: steps), to learn nothing."
    )
    deterministic: bool = Field(
        False,
        description="Two runs on the same machine and versions give the same numbers: sampling waits for each step's "
        "weights, one rollout group at a time, with fixed seeds. Several times slower.",
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of sampling, new weights and the order of finite tasks.")


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0, le=1, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = Field(
        "constant_with_warmup", description="Schedule of the learning rate."
    )
    warmup_steps: int = Field(5, ge=0, le=100_000, description="Steps over which the rate rises from 0.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, le=1000, description="Gradients are scaled down to this norm.")
    micro_batch_size: int = Field(
        0, ge=0, le=65536, description="Sequences per forward and backward pass; 0: the whole batch at once."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Number format of forward and backward passes; weights keep theirs. auto: bfloat16 on a GPU, "
        "float32 on a CPU. bfloat16 on a CPU needs AMX or AVX512-BF16 and pays from some 10 million parameters on.",
    )
    gradient_checkpointing: bool = Field(False, description="Trade time for memory in the backward pass.")
    eight_bit: bool = Field(False, description="Keep AdamW's moments in 8 bits (bitsandbytes, an NVIDIA GPU).")


class PpoSection(Section):
    """Proximal policy optimization (algorithm.name ppo)."""

    gamma: float = Field(1.0, gt=0, le=1, description="Discount from one sampled token to the next.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="Lambda of the generalized advantage: 1 uses the reward itself, 0 the next value."
    )
    clip_range: float = Field(0.2, gt=0, lt=10, description="Clip range of the importance ratio, both ways.")
    value_coef: float = Field(0.1, ge=0, le=100, description="Weight of the value loss.")
    value_clip_range: float = Field(
        0.2, ge=0, le=1e6, description="Largest change of a value on one batch, in units of reward; 0: no limit."
    )
    value_learning_rate: float | None = Field(
        None, gt=0, le=1, description="Peak rate of the value head; null: optimizer.learning_rate, at least 1e-5."
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Weight of the KL penalty against the starting policy, subtracted from the reward per token; 0: no "
        "penalty and no second model in memory.",
    )
    entropy_coef: float = Field(0.0, ge=0, le=10, description="Weight of the entropy bonus.")
    epochs: int = Field(2, ge=1, le=100, description="Passes over each batch.")
    minibatches: int = Field(1, ge=1, le=1024, description="Optimizer updates in each pass.")
    whiten_advantages: bool = Field(True, description="Scale the advantages of a batch to mean 0 and deviation 1.")


class SftSection(Section):
    """Supervised fine-tuning on demonstrations (algorithm.name sft), named as in TRL's SFTConfig."""

    teacher: str = Field(
        "solver",
        min_length=1,
        description="The teacher: 'solver' (the environment's own), or a model from the owner's settings.",
    )
    dataset: str = Field(
        "",
        max_length=80,
        description="A data set to learn from instead of a teacher: 'best@v2', or 'best' for its newest version.",
    )
    tasks: int = Field(256, ge=1, le=1_000_000, description="Training tasks to demonstrate.")
    traces_per_task: int = Field(2, ge=1, le=64, description="Most different demonstrations of each task.")
    attempts: int = Field(3, ge=1, le=64, description="Attempts at a demonstration; only correct ones are kept.")
    temperature: float = Field(0.7, ge=0, le=5, description="Sampling temperature of a teacher model.")
    max_new_tokens: int = Field(1024, ge=1, le=131_072, description="Longest answer of a teacher model, in tokens.")
    regenerate: bool = Field(False, description="Collect new demonstrations instead of using the collected ones.")
    epochs: int = Field(3, ge=1, le=1000, description="Passes over the demonstrations.")
    batch_size: int = Field(8, ge=1, le=65536, description="Conversations per step.")
    learning_rate: float = Field(2e-5, gt=0, le=1, description="Peak learning rate; it falls linearly to 0.")
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="Share of the steps over which the rate rises from 0.")
    weight_decay: float = Field(0.01, ge=0, le=1, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, le=1000, description="Gradients are scaled down to this norm.")
    max_length: int = Field(4096, ge=8, le=1_048_576, description="Longest conversation, in tokens.")
    save_epochs: int = Field(1, ge=1, le=1000, description="Passes between checkpoints; the last step always has one.")


class RolloutSection(Section):
    """Sampling and queueing of answers."""

    group_size: int = Field(8, ge=2, le=1024, description="Answers per task (TRL: num_generations).")
    groups_per_step: int = Field(8, ge=1, le=4096, description="Groups per optimizer step.")
    max_new_tokens: int = Field(256, ge=1, le=131_072, description="Longest answer of one turn, in tokens.")
    temperature: float = Field(1.0, gt=0, le=5, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    stop: list[str] = Field(default_factory=list, max_length=8, description="Texts that end an answer.")
    max_staleness: int = Field(
        8, ge=0, le=1024, description="Groups from a policy older than this many versions are dropped."
    )
    in_flight: Literal["auto", "keep", "pause", "drop"] = Field(
        "auto",
        description="Answers that are being sampled when new weights come. keep: they end with the old weights, and "
        "the update waits; pause: they go on with the new ones; drop (embedded alone): they begin again, once. auto: "
        "keep for embedded and for adapters in vllm, pause otherwise. Every token's version is known.",
    )
    outside: bool = Field(
        False, description="Environments outside of the run may post groups, by crew/outside.env in the run's folder."
    )
    unmatched: Literal["drop", "train"] = Field(
        "drop",
        description="For groups that such an environment posts with tokens that inference did not sample as posted, "
        "so their policy version is unknown. They are counted either way.",
    )
    queue_groups: int = Field(
        8, ge=1, le=65536, description="Groups that may wait for the trainer before sampling pauses."
    )
    concurrency: int = Field(16, ge=1, le=4096, description="Groups sampled at the same time.")
    difficulty_filter: bool = Field(
        False,
        description="Sample training tasks less often that were always or never solved lately; they are counted. A "
        "step's batch is filled with groups that carry signal in any case (algorithm.drop_zero_signal).",
    )


class InferenceSection(Section):
    """The engine that samples answers."""

    engine: Literal["embedded", "transformers", "vllm"] = Field(
        "embedded",
        description="embedded: for a CPU or a GPU, takes every model. transformers: its continuous batching, for "
        "a GPU where nothing else is installed. vllm: a vLLM server of the run's own (toprope engine add vllm).",
    )
    memory_share: float = Field(
        0.4,
        gt=0,
        le=0.98,
        description="Share of a GPU's memory for vllm, or of the free memory for the cache of transformers.",
    )
    transfer: Literal["disk", "gpu"] = Field(
        "disk",
        description="For vllm and full weights. disk: as a folder; gpu: within the memory of the GPU that it shares "
        "with the trainer, at the price of a copy there. Adapters always go by disk.",
    )
    sleep: bool = Field(
        False,
        description="With vllm and a trainer on the same GPU: free the sampler's memory during the trainer's passes. "
        "Sampling pauses in the meantime.",
    )


class EvaluationSection(Section):
    """Measurements before and after training. The held-out split is sealed: only these reports use it."""

    heldout_tasks: int = Field(200, ge=0, le=100_000, description="Held-out tasks, before and after training.")
    validation_tasks: int = Field(
        64, ge=1, le=100_000, description="Validation tasks for every_steps, and the default of test_inference."
    )
    every_steps: int = Field(
        0, ge=0, le=1_000_000, description="Also evaluate on validation tasks every so many steps; 0: never."
    )
    greedy: bool = Field(True, description="Also measure with the most likely token at each position.")
    examples: int = Field(6, ge=0, le=100, description="Validation tasks whose answers are kept, before and after.")


def _kept_rollouts(value: Any) -> Any:
    """The value of earlier versions' true and false."""
    return {"true": "all", "false": "none"}.get(str(value).strip().lower(), value)


class LoggingSection(Section):
    """Logs, checkpoints and stored rollouts of a run."""

    wandb: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="Weights & Biases; online needs WANDB_API_KEY in the owner's settings."
    )
    wandb_project: str = Field("toprope", min_length=1, description="The project in Weights & Biases and trackio.")
    trackers: list[Literal["tensorboard", "trackio"]] = Field(
        default_factory=list,
        max_length=2,
        description="Also copy the figures to these. tensorboard: files in the run's folder; trackio: its local "
        "database (pip install trackio).",
    )
    save_steps: int = Field(
        500, ge=1, le=1_000_000, description="Steps between checkpoints; the last step always has one."
    )
    journal_sync: Literal["always", "group", "os"] = Field(
        "group",
        description="The moment when a rollout counts as stored. group: on disk, many at once; always: on disk, one by "
        "one; os: with the operating system, which survives every crash except the machine's own.",
    )
    keep_rollouts: Annotated[Literal["all", "sample", "none"], BeforeValidator(_kept_rollouts)] = Field(
        "all",
        description="Rollouts from before a checkpoint that the run keeps: all; sample: every sixteenth group; none.",
    )
    save_total_limit: int = Field(2, ge=1, le=1000, description="Checkpoints to keep.")


class BudgetSection(Section):
    """The length of a run."""

    steps: int = Field(1000, ge=1, le=10_000_000, description="Optimizer steps.")
    max_train_seconds: float | None = Field(
        None, gt=0, description="Training ends normally after so many seconds, at any step; null: no limit."
    )


class Config(BaseModel, extra="forbid", validate_assignment=True):
    """The whole configuration."""

    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    policy: PolicySection = Field(default_factory=PolicySection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    sft: SftSection = Field(default_factory=SftSection)
    ppo: PpoSection = Field(default_factory=PpoSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    inference: InferenceSection = Field(default_factory=InferenceSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    launcher: LauncherSection = Field(default_factory=LauncherSection)
    budget: BudgetSection = Field(default_factory=BudgetSection)

    @property
    def is_hosted(self) -> bool:
        """True if a service trains and samples, and nothing here computes."""
        return self.trainer.backend == TINKER

    @property
    def samples_in_step(self) -> bool:
        """True if groups are sampled only while the trainer waits for them, by the weights that they train."""
        return self.algorithm.deterministic or self.rollout.max_staleness == 0

    def conflicts(self) -> list[str]:
        """Sentences about fields that contradict each other; empty if the configuration is consistent."""
        found = mixture_conflicts(self.environment) + hosted_conflicts(lambda name: attrgetter(name)(self))
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
        found += self._engine_conflicts()
        algorithm = self.algorithm
        values = {f"algorithm.{name}": getattr(algorithm, name) for name in AlgorithmSection.model_fields}
        found += contradictions(algorithm.name, values)
        if algorithm.importance_sampling_mode != "none":
            if algorithm.loss_type == "vespo" or algorithm.name in ("ppo", "sft", "custom"):
                name = "loss_type vespo" if algorithm.loss_type == "vespo" else f"name {algorithm.name}"
                found.append(f"algorithm.importance_sampling_mode has no effect with algorithm.{name}; set it to none.")
            if algorithm.importance_sampling_clip_min > algorithm.importance_sampling_clip_max:
                found.append("algorithm.importance_sampling_clip_min exceeds algorithm.importance_sampling_clip_max.")
        if policy.load_in_4bit and policy.load_in_8bit:
            found.append("policy.load_in_4bit and policy.load_in_8bit exclude each other.")
        elif (policy.load_in_4bit or policy.load_in_8bit) and not policy.lora:
            bits = "4" if policy.load_in_4bit else "8"
            found.append(f"policy.load_in_{bits}bit freezes the weights, so it needs policy.lora.")
        processes = self.launcher.num_processes
        if processes > 1 and algorithm.name in ("sft", "custom"):
            found.append(f"launcher.num_processes is {processes}, and algorithm.name {algorithm.name} trains in one.")
        if processes > 1 and self.optimizer.eight_bit:
            found.append(
                "optimizer.eight_bit is for one process: its moments cannot be split (launcher.num_processes)."
            )
        if (algorithm.name == "custom") != bool(algorithm.trainer):
            found.append(
                "algorithm.name custom needs algorithm.trainer, such as 'reinforce.py:Reinforce'."
                if algorithm.name == "custom"
                else f'algorithm.trainer is for algorithm.name custom; set it to "" with {algorithm.name}.'
            )
        if self.launcher.driver_count > 1:
            need = "needs one driver (launcher.drivers, launcher.nodes - 1)"
            if algorithm.deterministic:
                found.append(f"algorithm.deterministic {need}, which samples in step.")
            elif self.samples_in_step:
                found.append(f"rollout.max_staleness 0 {need}, which samples in step.")
            if any(plan.curriculum for plan in members_of(self.environment)):
                found.append(f"environment.curriculum {need}, which measures the levels.")
        return found

    def _engine_conflicts(self) -> list[str]:
        engine, problems = self.inference.engine, []
        if engine != "embedded" and self.algorithm.deterministic:
            problems.append(f"algorithm.deterministic needs inference.engine embedded; it is {engine}.")
        if engine == "vllm" and self.launcher.nodes > 1:
            problems.append("inference.engine vllm needs launcher.nodes 1: its weights do not travel between nodes.")
        if self.inference.transfer == "gpu" and self.launcher.num_processes > 1 and not self.policy.lora:
            problems.append("inference.transfer gpu needs launcher.num_processes 1, or adapters (policy.lora).")
        if engine == "vllm" and self.algorithm.name == "custom":
            problems.append(
                "inference.engine vllm takes no weights from a trainer of the owner (algorithm.name custom)."
            )
        bits = "4" if self.policy.load_in_4bit else "8"
        if engine == "vllm" and (self.policy.load_in_4bit or self.policy.load_in_8bit):
            problems.append(
                f"policy.load_in_{bits}bit needs inference.engine embedded or transformers; it is vllm, which serves "
                "the whole weights, so the trainer's check of them would fail. Change the engine, or set "
                f"policy.load_in_{bits}bit to false."
            )
        in_flight = self.rollout.in_flight
        if in_flight == "drop" and engine != "embedded" or in_flight == "keep" and engine == "transformers":
            problems.append(f"rollout.in_flight {in_flight} is not possible with inference.engine {engine}.")
        if in_flight not in ("auto", "keep") and self.algorithm.deterministic:
            problems.append(f"algorithm.deterministic needs rollout.in_flight auto or keep; it is {in_flight}.")
        for name, is_set in (("sleep", self.inference.sleep), ("transfer gpu", self.inference.transfer == "gpu")):
            if engine != "vllm" and is_set:
                problems.append(f"inference.{name} needs inference.engine vllm; it is {engine}.")
            if is_set and self.launcher.inference_gpus:
                problems.append(f"inference.{name} is for one GPU; launcher.inference_gpus gives inference its own.")
        return problems


SECTIONS: tuple[str, ...] = tuple(Config.model_fields)
