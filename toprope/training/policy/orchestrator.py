"""The orchestrator's policy alone, for programs that want to use what was trained and nothing else of a run.

    from toprope.training.policy.orchestrator import OrchestratorPolicy

    policy = OrchestratorPolicy.from_checkpoint("~/.local/share/toprope/runs/orchestrator-261121-2335-sh6r")
    state = environment.reset("What is 417 * 38?")        # toprope.sdk.orchestration.OrchestratorEnvironment
    while not environment.done(state):
        environment.step(state, policy.predict_action(state, tools))

It sees a state as the environment `orchestrator` shows it in training: the same system prompt, the answers as they were
given, the observations. Weights are safetensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toprope.errors import InvalidValue, NotFound, TopropeError
from toprope.records.run.checkpoints import newest_sound, nothing_sound
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.sdk.orchestration.dialogue import Mode, build_system_prompt, parse_action, render_observation
from toprope.sdk.orchestration.episode import Action, State, Step
from toprope.settings.schema import EMBEDDED, PolicySection
from toprope.training.policy.loading import load_tokenizer, place
from toprope.training.policy.quantization import quantized

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["OrchestratorPolicy"]

Told = Literal["descriptions", "names", "none"]


class OrchestratorPolicy:
    """A causal language model that chooses actions.

    Args:
        model: A transformers model, on its device.
        tokenizer: Its tokenizer, with a chat template.
        mode: How it answers: structured text, or the tool calls of chat templates.
        told: What it is told of its tools in a system prompt.
        max_tokens: Longest answer, in tokens.
        temperature: Of sampling; 0: the most likely token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        mode: Mode = "structured",
        told: Told = "descriptions",
        max_tokens: int = 256,
        temperature: float = 0.7,
    ) -> None:
        if max_tokens < 1 or temperature < 0:
            raise InvalidValue("max_tokens must be 1 or more, and temperature 0 or more.")
        self.model, self.tokenizer = model, tokenizer
        self.mode, self.told = mode, told
        self.max_tokens, self.temperature = max_tokens, temperature

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
        """The policy of a folder, or of a Hugging Face id, which is downloaded if need be.

        Args:
            model: Folder with a model (or LoRA adapters) and its tokenizer, a Hub id, or `embedded-tools`.
            gradient_checkpointing: Compute activations again in a backward pass, if you train it further.
            load_in_8bit: Weights in 8 bits; needs bitsandbytes and an NVIDIA GPU.
            device: `auto` (a GPU where there is one), or as PyTorch names it.
            cache: Where policies that are made on the spot are kept; needed for those alone.
            settings: As the class has them.

        Raises:
            NotFound: There is no such folder or id.
            InvalidValue: What is there cannot be loaded, or 8 bits are not possible here.
        """
        import torch

        if str(model) in EMBEDDED and cache is None:
            raise InvalidValue(f"{model} is made on the spot and needs a folder to keep it: give cache.")
        folder = place(PolicySection(model=str(model)), Path(cache or ".").expanduser(), lambda report: None)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = _model_of(folder, device, load_in_8bit)
        if gradient_checkpointing:
            loaded.activation_checkpointing_enable()
        return cls(loaded, load_tokenizer(folder), **settings)

    @classmethod
    def from_checkpoint(cls, path: str | Path, **arguments: Any) -> OrchestratorPolicy:
        """What a run trained.

        Args:
            path: The run's folder, of whose checkpoints the newest sound one is taken; or one checkpoint's.
            arguments: As `from_pretrained` has them. How the policy answers and what it is told are the run's, where
                `path` is a run.

        Raises:
            NotFound: There is nothing of the kind.
            Corrupt: Every checkpoint of the run is damaged.
        """
        folder = Path(path).expanduser().resolve()
        if (folder / "spec.json").is_file():
            run = RunFolder(folder)
            found, damaged = newest_sound(run)
            if found is None:
                if damaged:
                    raise nothing_sound(run, damaged)
                raise NotFound(f"The run {folder.name} has no checkpoint yet.")
            knobs = Specification.read(run).config.environment.knobs
            arguments = {
                "mode": knobs.get("mode", "structured"),
                "told": knobs.get("system_prompt", "descriptions"),
            } | arguments
            return cls.from_pretrained(found.path / "model", **arguments)
        if (folder / "model").is_dir():
            folder = folder / "model"
        if not folder.is_dir():
            raise NotFound(f"{folder} is neither the folder of a run nor that of a checkpoint.")
        return cls.from_pretrained(folder, **arguments)

    def predict_action(self, state: State, tools: Sequence[Any] | Sequence[str]) -> Action:
        """What the policy does next.

        Args:
            state: The task, and what was done so far.
            tools: `toprope.sdk.orchestration.Tool`s, or their names.

        Returns:
            The action, its `confidence` the geometric mean of its tokens' probabilities. An answer that is none has a
            `problem` that says what is missing.

        Raises:
            InvalidValue: The state is longer than the model's context.
        """
        import torch

        prompt = self._prompt(state, tools)
        room = getattr(self.model.config, "max_position_embeddings", None)
        if room is not None and len(prompt) >= room:
            raise InvalidValue(f"The state has {len(prompt)} tokens, and the policy's context {room}.")
        most = self.max_tokens if room is None else min(self.max_tokens, room - len(prompt))
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}
        ids = torch.tensor([prompt], device=self.model.device)
        with torch.no_grad(), _answering(self.model):
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                output_scores=True,
                return_dict_in_generate=True,
                **sampling,
            )
        answer = made.sequences[0, len(prompt) :]
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        action = parse_action(text, self.mode)
        return Action(**{**action.__dict__, "confidence": _confidence(made.scores, answer)})

    def save(self, folder: str | Path) -> Path:
        """Writes model (as safetensors) and tokenizer, so that `from_pretrained` loads them; returns the folder."""
        folder = Path(folder).expanduser()
        self.model.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)
        return folder

    def _prompt(self, state: State, tools: Sequence[Any]) -> list[int]:
        messages: list[dict[str, str]] = []
        if self.told != "none":
            told = build_system_prompt(tools, mode=self.mode, descriptions=self.told == "descriptions")
            messages.append({"role": "system", "content": told})
        messages.append({"role": "user", "content": state.initial_prompt})
        for step in state.history:
            messages.append({"role": "assistant", "content": _answer_of(step)})
            messages.append(render_observation(step.observation.content, self.mode))
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer_of(step: Step) -> str:
    """What the policy said; written out where an action was made by hand."""
    action = step.action
    if action.raw_text:
        return action.raw_text
    if action.is_final_answer:
        return f"FINAL_ANSWER: {action.tool_input}"
    return f"THOUGHT: {action.thought}\nTOOL: {action.tool_name}\nINPUT: {action.tool_input}"


def _model_of(folder: Path, device: str, load_in_8bit: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    if load_in_8bit:
        how |= {"quantization_config": quantized("load_in_8bit"), "device_map": {"": device}}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **how)
        return model.eval() if load_in_8bit else model.to(device).eval()
    except TopropeError:
        raise
    except Exception as error:  # transformers, safetensors and torch raise trees of their own
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidValue(f"The model in {folder} cannot be loaded on {device}: {cause[:300]}") from error


@contextmanager
def _answering(model: Any) -> Iterator[None]:
    """Without dropout, whatever the model's owner does with it between answers."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


def _confidence(scores: Sequence[torch.Tensor], answer: torch.Tensor) -> float:
    """exp of the mean log-probability of the tokens. `scores`: (1, vocabulary) for each token of `answer`."""
    import torch

    if not scores:
        return 1.0
    logprobs = torch.log_softmax(torch.cat(list(scores)).float(), -1)
    return float(logprobs.gather(1, answer[: len(scores), None]).mean().exp())
