"""A trained orchestrator as a policy for other programs, without a run.

    from toprope.training.policy.orchestrator import OrchestratorPolicy

    policy = OrchestratorPolicy.from_checkpoint("~/.local/share/toprope/runs/orchestrator-261121-2335-sh6r")
    state = environment.reset("What is 417 * 38?")        # toprope.sdk.orchestration.OrchestratorEnvironment
    while not environment.done(state):
        environment.step(state, policy.predict_action(state, tools))

The policy sees a state as the environment `orchestrator` shows it in training: the same system prompt, the sampled
answers, the observations. Weights are loaded from safetensors only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toprope.errors import InvalidValue, NotFound
from toprope.records.run.checkpoints import newest_sound, no_sound_checkpoint
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.sdk.orchestration.dialogue import Mode, build_system_prompt, parse_action, render_observation
from toprope.sdk.orchestration.energy import Meter
from toprope.sdk.orchestration.episode import Action, State, Step
from toprope.settings.schema import EMBEDDED, PolicySection
from toprope.training.policy.loading import load_pretrained, load_tokenizer, place
from toprope.training.policy.quantization import quantization_config
from toprope.training.policy.turn_end import find_end_ids

if TYPE_CHECKING:
    import torch

SystemPrompt = Literal["descriptions", "names", "none"]


class OrchestratorPolicy:
    """A causal language model that chooses actions.

    Args:
        model: A transformers model, on its device.
        tokenizer: Its tokenizer, with a chat template.
        mode: Form of its answers: structured text, or the tool calls of chat templates.
        system_prompt: Content of the system prompt about tools: their descriptions, their names, or none at all.
        max_tokens: Longest answer, in tokens.
        temperature: Sampling temperature; 0 takes the most likely token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        mode: Mode = "structured",
        system_prompt: SystemPrompt = "descriptions",
        max_tokens: int = 256,
        temperature: float = 0.7,
    ) -> None:
        if max_tokens < 1 or temperature < 0:
            raise InvalidValue("max_tokens must be 1 or more, and temperature 0 or more.")
        self.model, self.tokenizer = model, tokenizer
        self.mode, self.system_prompt = mode, system_prompt
        self.max_tokens, self.temperature = max_tokens, temperature
        self._end_ids = sorted(find_end_ids(model, tokenizer)) or None
        self._meter = Meter()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        gradient_checkpointing: bool = False,
        load_in_8bit: bool = False,
        device: str = "auto",
        cache: str | Path | None = None,
        **settings: Any,
    ) -> OrchestratorPolicy:
        """Load the policy from a folder or a Hugging Face id, which is downloaded if necessary.

        Args:
            model: Folder with a model (or LoRA adapters) and its tokenizer, a Hub id, or `embedded-tools`.
            gradient_checkpointing: Recompute activations in the backward pass, for further training.
            load_in_8bit: Load weights in 8 bits; needs bitsandbytes and an NVIDIA GPU.
            device: A PyTorch device, or `auto` for a GPU if there is one.
            cache: Folder for embedded policies; required for them only.
            settings: Further arguments of the class.

        Raises:
            NotFound: There is no such folder or id.
            InvalidValue: The model cannot be loaded, or 8 bits are not possible here.
        """
        import torch

        if str(model) in EMBEDDED and cache is None:
            raise InvalidValue(f"{model} is built on first use and needs a folder to keep it: give cache.")
        folder = place(PolicySection(model=str(model)), Path(cache or ".").expanduser(), lambda report: None)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        options: dict[str, Any] = {"dtype": torch.float32 if device == "cpu" else torch.bfloat16}
        if load_in_8bit:
            options |= {"quantization_config": quantization_config("load_in_8bit"), "device_map": {"": device}}
        loaded = load_pretrained(folder, None if load_in_8bit else device, **options).eval()
        if gradient_checkpointing:
            loaded.activation_checkpointing_enable()
        return cls(loaded, load_tokenizer(folder), **settings)

    @classmethod
    def from_checkpoint(cls, path: str | Path, **arguments: Any) -> OrchestratorPolicy:
        """Load the policy that a run trained.

        Args:
            path: The run's folder, for its newest sound checkpoint, or the folder of one checkpoint.
            arguments: Arguments of `from_pretrained`. For a run, `mode` and `system_prompt` default to the run's.

        Raises:
            NotFound: There is no checkpoint.
            Corrupt: Every checkpoint of the run is damaged.
        """
        folder = Path(path).expanduser().resolve()
        if (folder / "spec.json").is_file():
            run = RunFolder(folder)
            checkpoint, damaged = newest_sound(run)
            if checkpoint is None:
                if damaged:
                    raise no_sound_checkpoint(run, damaged)
                raise NotFound(f"The run {folder.name} has no checkpoint yet.")
            knobs = Specification.read(run).config.environment.knobs
            arguments = {
                "mode": knobs.get("mode", "structured"),
                "system_prompt": knobs.get("system_prompt", "descriptions"),
            } | arguments
            return cls.from_pretrained(checkpoint.path / "model", **arguments)
        if (folder / "model").is_dir():
            folder = folder / "model"
        if not folder.is_dir():
            raise NotFound(f"{folder} is neither the folder of a run nor that of a checkpoint.")
        return cls.from_pretrained(folder, **arguments)

    def predict_action(self, state: State, tools: Sequence[Any] | Sequence[str]) -> Action:
        """Sample the next action.

        Args:
            state: The task and the steps so far.
            tools: `toprope.sdk.orchestration.Tool`s, or their names.

        Returns:
            The action, with its tokens, seconds and joules; `confidence` is the geometric mean of its tokens'
            probabilities. If the answer is not a valid action, `problem` gives the reason.

        Raises:
            InvalidValue: The state is longer than the model's context.
        """
        import torch

        prompt = self._prompt(state, tools)
        context = getattr(self.model.config, "max_position_embeddings", None)
        if context is not None and len(prompt) >= context:
            raise InvalidValue(f"The state has {len(prompt)} tokens, and the policy's context {context}.")
        max_tokens = self.max_tokens if context is None else min(self.max_tokens, context - len(prompt))
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}
        ids = torch.tensor([prompt], device=self.model.device)
        self._meter.start()
        with torch.no_grad(), _evaluation_mode(self.model):
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self._end_ids,
                output_scores=True,
                return_dict_in_generate=True,
                **sampling,
            )
        answer = output.sequences[0, len(prompt) :]
        used = self._meter.stop()
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return replace(
            parse_action(text, self.mode, tools),
            confidence=_confidence(output.scores, answer),
            latency_seconds=used.seconds,
            energy_joules=used.joules,
            tokens=len(answer),
            energy_source=used.source,
        )

    def save(self, folder: str | Path) -> Path:
        """Write the model (as safetensors) and its tokenizer for `from_pretrained`; returns the folder."""
        folder = Path(folder).expanduser()
        self.model.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)
        return folder

    def _prompt(self, state: State, tools: Sequence[Any]) -> list[int]:
        messages: list[dict[str, str]] = []
        if self.system_prompt != "none":
            text = build_system_prompt(tools, mode=self.mode, descriptions=self.system_prompt == "descriptions")
            messages.append({"role": "system", "content": text})
        messages.append({"role": "user", "content": state.initial_prompt})
        for step in state.history:
            messages.append({"role": "assistant", "content": _answer_text(step)})
            messages.append(render_observation(step.observation.content, self.mode))
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer_text(step: Step) -> str:
    """The policy's answer, or the text of an action that was created by hand."""
    action = step.action
    if action.raw_text:
        return action.raw_text
    if action.is_final_answer:
        return f"FINAL_ANSWER: {action.tool_input}"
    return f"THOUGHT: {action.thought}\nTOOL: {action.tool_name}\nINPUT: {action.tool_input}"


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout off, and restore the model's mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _confidence(scores: Sequence[torch.Tensor], answer: torch.Tensor) -> float:
    """exp of the mean log-probability of the answer's tokens; `scores` has (1, vocabulary) for each."""
    import torch

    if not scores:
        return 1.0
    logprobs = torch.log_softmax(torch.cat(list(scores)).float(), -1)
    return float(logprobs.gather(1, answer[: len(scores), None]).mean().exp())
