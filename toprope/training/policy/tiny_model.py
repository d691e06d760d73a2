"""The embedded policy: a language model of 124,000 parameters, made on the spot in about a minute of one core.

Why it exists: to try a run, a tool or an environment one needs a policy, and a useful one takes gigabytes and a GPU.
This one needs neither, nor a network, and it can be trained for real: on `spell_backward` reinforcement learning takes
it from a few per cent to about nine answers in ten in little more than a minute, while everything around it (groups,
staleness, weights handed over, checkpoints) is what a large model would go through.

What its warm start teaches, and what not: it is shown strings of random letters, each answered by the same letters in
RANDOM order and an end token. So it learns the format of an answer and to use each letter once. Which order is wanted
is never shown: reversals occur no more often than chance has it (1/6 of orders for three letters, 1/24 for four, 1/120
for five), and before reinforcement learning it is right about that often. The skill comes from reward alone. The
strings are drawn letter by letter, never from a task's words; one that a task holds out can occur by coincidence only,
and then with its letters in random order.

What it is not: a model of any use. It knows no language; on any task but this family it answers with letters of the
question. Text of every kind still passes through its tokenizer unharmed.

At module level only the standard library is imported, so that a process without torch can ask for the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["RECIPES", "Recipe", "build", "make_tokenizer", "warm_start_batch"]

_VERSION = 1
"""Raise it when this module's code changes what `build` makes from an unchanged recipe."""

_IGNORED = -100
"""Label of a position without loss, as PyTorch's cross entropy has it."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

# Per cent of each letter, a to z, in English text. Half of a string's letters follow it, for the sake of doubled ones.
_ENGLISH_PERCENT = (
    *(8.2, 1.5, 2.8, 4.3, 12.7, 2.2, 2.0, 6.1, 7.0, 0.15, 0.8, 4.0, 2.4),
    *(6.7, 7.5, 1.9, 0.1, 6.0, 6.3, 9.1, 2.8, 1.0, 2.4, 0.15, 2.0, 0.07),
)

# <|role|>content<|end|> for every message. Each message's text depends on that message only, and the generation prompt
# is exactly how an assistant's message begins. So what was rendered for one turn, followed by the sampled answer and
# its end token, is how the next turn's prompt begins: turns join into one sequence of tokens.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = message['role'] if message['role'] in ['system', 'user', 'assistant', 'tool'] else 'user' %}"
    "{{ '<|' + role + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] if 'text' in part else '' }}{% endfor %}"
    "{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Every constant from which the embedded policy is made. Equal recipes on one machine make equal weights."""

    seed: int = 0
    """Of the first weights and of the strings shown."""

    # Model. Four heads of 16: with two heads of 32 the letters are learned several times slower. 128 hidden units cost
    # five times the time of a step.
    hidden_size: int = 64
    intermediate_size: int = 192
    layers: int = 2
    heads: int = 4
    context: int = 4096
    """Longest sequence in tokens; rotary positions, so a longer one costs no parameters."""
    rope_theta: float = 100.0
    """Base of the rotary positions, small because what matters here lies within twenty tokens."""
    initializer_range: float = 0.1
    """Standard deviation of the first weights, near hidden_size ** -0.5. Llama's usual 0.02 is meant for widths of
    thousands; with it the warm start takes more than twice as many steps."""

    # Tokenizer: 256 bytes, these, and no merges.
    end_token: str = "<|end|>"
    """Ends every message, so every answer too."""
    pad_token: str = "<|pad|>"
    role_tokens: tuple[str, ...] = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
    phrase_tokens: tuple[str, ...] = ("Spell this word backward (example: sun -> nus): ",)
    """Boilerplate of questions that is one token each. It changes no text, but makes one token of 48 bytes: a whole
    prompt takes 7 to 9 tokens, which is several times faster and learned sooner."""

    # Warm start.
    steps: int = 1800
    batch_size: int = 64
    """Strings a step, each of about a dozen tokens."""
    shortest: int = 3
    """Letters of the shortest string."""
    length_weights: tuple[float, ...] = (1.0, 2.0, 3.0)
    """How often strings of `shortest`, `shortest + 1`, ... letters are shown, relative to each other."""
    capitalised: float = 0.1
    """Share of strings with a capital first letter."""
    learning_rate: float = 5e-3
    warmup_steps: int = 50
    """Steps in which the rate rises from 0; then it falls along a line to `final_rate_share` of it at the last step. A
    copy of the right letters is only as reliable as the last, small steps make it, and that bounds what is sampled."""
    final_rate_share: float = 0.02
    adam_betas: tuple[float, float] = (0.9, 0.98)
    max_grad_norm: float = 1.0

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change whenever what `build` makes would."""
        content = json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


RECIPES: Mapping[str, Recipe] = {
    "embedded": Recipe(),
    # Knows nothing at all: what it can do with tools it learns from demonstrations, then from reward.
    "embedded-tools": Recipe(
        steps=0,
        phrase_tokens=(
            *("What is ", "?", " + ", " - ", " * "),
            *(
                "THOUGHT: I compute it.\nTOOL: ",
                "THOUGHT: Let me see.\nTOOL: ",
                "calculator",
                "code_interpreter",
                "think",
                "expert",
            ),
            *("\nINPUT: ", "print(", "OBSERVATION: ", "Noted.", "FINAL_ANSWER: "),
        ),
    ),
}
"""Policies that are made on the spot, by the name that `policy.model` has for them."""


def build(folder: Path, recipe: Recipe, progress: Callable[[int, int, float], None] | None = None) -> None:
    """Makes tokenizer and model, warm-starts the model and saves both, so that `transformers` can load them by folder.

    It computes in one thread, and leaves torch's number of threads and its global random state as they were.

    Args:
        folder: Where to save; it is created if need be. `recipe.json` is written last, as the mark of completeness.
        recipe: What to make.
        progress: Called every few steps with steps done, steps in all, and the loss in nats per answer token.
    """
    import torch
    from transformers import GenerationConfig

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order would make other weights, and tensors this small gain nothing
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            tokenizer = make_tokenizer(recipe)
            model = _make_model(recipe, tokenizer)
            _warm_start(model, tokenizer, recipe, progress)
    finally:
        torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)  # as safetensors
    tokenizer.save_pretrained(folder)
    content = {"version": _VERSION, "fingerprint": recipe.fingerprint(), **asdict(recipe)}
    (folder / "recipe.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """One token a byte, so that any text survives, and one for each role, end, padding and known phrase.

    Ids 0 to 255 are the bytes of that value.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([recipe.pad_token, recipe.end_token, *recipe.role_tokens])
    # Not special: decoding with skip_special_tokens must bring the phrase back.
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in recipe.phrase_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=recipe.end_token,
        pad_token=recipe.pad_token,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=recipe.context,
        padding_side="left",
        clean_up_tokenization_spaces=False,  # it would delete spaces before punctuation
    )


def _byte_alphabet() -> list[str]:
    """The character by which byte-level tokenizers write each byte, by value: itself where it is printable, else the
    next free one from U+0100 on (GPT-2's convention, which `tokenizers` follows)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(free)) for byte in range(256)]


def _make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=-(-len(tokenizer) // 8) * 8,  # rows in eights; ids past the tokenizer's are never seen
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.context,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            initializer_range=recipe.initializer_range,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    progress: Callable[[int, int, float], None] | None,
) -> None:
    """Trains the model to answer with the question's letters in random order, by next-token cross entropy."""
    import torch
    import torch.nn.functional as F

    chooser = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.adam_betas, weight_decay=0.0
    )
    model.train()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate_share(step, recipe)
        ids, labels = (torch.tensor(rows) for rows in warm_start_batch(chooser, tokenizer, recipe))
        # Padding stands on the right and attention looks left, so it needs no mask, which saves time.
        logits = model(input_ids=ids, use_cache=False).logits  # (batch, tokens, vocabulary)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        if progress is not None and ((step + 1) % 20 == 0 or step + 1 == recipe.steps):
            progress(step + 1, recipe.steps, loss.item())
    model.eval()


def _rate_share(step: int, recipe: Recipe) -> float:
    """The step's learning rate as a share of the recipe's."""
    rising = (step + 1) / recipe.warmup_steps
    falling = max(recipe.final_rate_share, 1 - step / recipe.steps)
    return min(1.0, rising) * falling


def warm_start_batch(chooser: random.Random, tokenizer: Any, recipe: Recipe) -> tuple[list[list[int]], list[list[int]]]:
    """Draws one batch: questions about random letters, answered by the same letters in random order.

    Returns:
        Token ids and labels, both (batch_size, tokens of the longest possible row), padded on the right; labels are
        ignored but for the answer and its end token. The label of a token stands at the token's own position.
    """
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    phrases = tokenizer.convert_tokens_to_ids(list(recipe.phrase_tokens))
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    longest = recipe.shortest + len(recipe.length_weights) - 1
    width = 5 + 2 * longest  # user, phrase, letters, end, assistant, letters, end
    lengths = range(recipe.shortest, longest + 1)
    weights = [percent + 100 / len(_LETTERS) for percent in _ENGLISH_PERCENT]
    ids, labels = [], []
    for _ in range(recipe.batch_size):
        (length,) = chooser.choices(lengths, recipe.length_weights)
        letters = [ord(letter) for letter in chooser.choices(_LETTERS, weights, k=length)]  # a byte's id is its value
        if chooser.random() < recipe.capitalised:
            letters[0] -= ord("a") - ord("A")
        answer = chooser.sample(letters, length)  # every order equally likely, the reverse no more than the others
        prompt = [user, chooser.choice(phrases), *letters, end, assistant]
        padding = width - len(prompt) - length - 1
        ids.append([*prompt, *answer, end, *[pad] * padding])
        labels.append([*[_IGNORED] * len(prompt), *answer, end, *[_IGNORED] * padding])
    return ids, labels
