"""The token with which a chat template closes an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.training.component.time_limit import render_limit

_QUESTION, _ANSWER = "question", "answer"
_ENDS = "eos_token_id"


def turn_end_ids(tokenizer: Any) -> frozenset[int]:
    """The id of the special token that the chat template writes directly behind an answer; empty without one.

    It ends an answer, too. Tokenizers of base models often name another end, the one of documents: Qwen2.5's is
    <|endoftext|>, and its template closes turns with <|im_end|>.
    """
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        with render_limit():
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        _, separator, ending = text.rpartition(_ANSWER)
        end: int = tokenizer(ending, add_special_tokens=False)["input_ids"][0]
        closes = bool(separator) and tokenizer.added_tokens_decoder[end].special
    except Exception:  # a template is a program from the model and may raise anything
        return frozenset()
    return frozenset([end]) if closes else frozenset()


def end_ids_of(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Token ids that end an answer, by a policy's files, its tokenizer and chat template."""
    declarations = (
        _read_json(folder / "config.json"),
        _read_json(folder / "generation_config.json"),
        {_ENDS: tokenizer.eos_token_id},
    )
    return frozenset(token for declaration in declarations for token in _ends(declaration)) | turn_end_ids(tokenizer)


def find_end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end an answer, by the model's generation settings, its tokenizer and chat template."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id]
    return frozenset(token for token in ids if token is not None) | turn_end_ids(tokenizer)


def declare_turn_end(folder: Path, tokenizer: Any) -> None:
    """Add the token to the ends that a written model declares, so that other programs stop there too."""
    config_file, ids = folder / "generation_config.json", turn_end_ids(tokenizer)
    generation_config = _read_json(config_file)
    declared = (
        _ends(generation_config) or _ends(_read_json(folder / "config.json")) or _ends({_ENDS: tokenizer.eos_token_id})
    )
    if not ids <= set(declared):
        write_json(config_file, {**generation_config, _ENDS: [*declared, *(ids - set(declared))]}, indent=2)


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return content


def _ends(declaration: dict[str, Any]) -> list[int]:
    ends = declaration.get(_ENDS)
    return [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
