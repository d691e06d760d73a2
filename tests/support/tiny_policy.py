"""A policy with random weights that loads in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_tiny_policy(folder: Path, **shape: Any) -> Path:
    """Puts a byte-level tokenizer, a chat template and a small random Llama into an existing folder.

    Args:
        shape: Fields of its configuration that differ from the usual.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1, "<user>": 2, "<bot>": 3}
    vocabulary |= {letter: index + 4 for index, letter in enumerate(letters)}
    vocabulary |= {f"<{number}>": number for number in range(len(vocabulary), shape.get("vocab_size", 0))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<bot>"],
        chat_template=(
            "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}<eos>"
            "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
        ),
    )
    tokenizer.save_pretrained(folder)
    usual: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**usual | shape))
    model.save_pretrained(folder)
    return folder
