"""ChatML: a tokenizer of bytes that writes it, and conversations read back from its texts.

The policy's server makes prompts by the policy's own template and records the tokens that it sampled. So any tokenizer
serves an author's code that gives a text back exactly, and one of bytes needs no download.
"""

from __future__ import annotations

import functools
import re
import tempfile
from typing import Any

from toprope.sdk.authoring.environment import Messages
from toprope.sdk.tooled import TOOLS_PROMPT

__all__ = ["BYTES_PER_TOKEN", "folder_of_bytes", "messages_in", "tokenizer_of_bytes"]

BYTES_PER_TOKEN = 4
_BEGIN, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TEMPLATE = (
    "{% macro text(content) %}"
    "{% if content is string %}{{ content }}"
    "{% elif content %}{% for block in content %}{{ block.get('text', '') }}{% endfor %}{% endif %}"
    "{% endmacro %}"
    "{% set told = namespace(of_tools=false) %}"
    "{% if tools %}{% set tools_told %}"
    + TOOLS_PROMPT.format(tools="{{ tools | map('tojson') | join('\n') }}")
    + "{% endset %}"
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n{{ tools_told }}<|im_end|>\n"
    "{% set told.of_tools = true %}{% endif %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ text(message['content']) }}"
    "{% for call in message.get('tool_calls') or [] %}{{ '\n' if message['content'] or not loop.first else '' }}"
    "{% set function = call.function or call %}<tool_call>\n"
    '{"name": {{ function.name | tojson }}, "arguments": '
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}"
    "{% if tools and not told.of_tools %}{{ '\n\n' }}{{ tools_told }}{% set told.of_tools = true %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROLES = "system|user|assistant|tool"
_TURN = re.compile(rf"{re.escape(_BEGIN)}({_ROLES})\n")
_NO_THOUGHTS = re.compile(r"<think>\s*</think>")


def tokenizer_of_bytes() -> Any:
    """Return a new tokenizer of bytes with a template of ChatML; `transformers` and `tokenizers` must be installed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found,unused-ignore]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found,unused-ignore]

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    byte_tokenizer = Tokenizer(models.BPE(letters, []))
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, bos_token=_PAD, eos_token=_END, pad_token=_PAD, chat_template=_TEMPLATE,
        additional_special_tokens=[_BEGIN], clean_up_tokenization_spaces=False,
    )  # fmt: skip


@functools.cache
def folder_of_bytes() -> str:
    """Return a folder from which the tokenizer of bytes can be loaded."""
    folder = tempfile.mkdtemp(prefix="tokenizer-")
    tokenizer_of_bytes().save_pretrained(folder)
    return folder


def messages_in(text: str) -> tuple[Messages, str]:
    """Return the messages of a prompt, and the beginning of the policy's answer that it ends with.

    A text without ChatML is one message of the user. A turn that its end token does not close, as an answer that was
    cut, ends at the next one. The open turn of the policy is no message; empty thoughts, with which templates ask for
    an answer without any, begin no answer. Padding before the first turn is no text.
    """
    turns = list(_TURN.finditer(text))
    if not turns or text[: turns[0].start()].replace(_PAD, "").strip():
        return [{"role": "user", "content": text}], ""
    messages: Messages = []
    ends = [turn.start() for turn in turns[1:]] + [len(text)]
    for turn, end in zip(turns, ends, strict=True):
        content, closed, rest = text[turn.end() : end].rpartition(_END)
        if not closed or rest.strip():
            content, closed = text[turn.end() : end], ""
        if end == len(text) and not closed and turn[1] == "assistant":
            return messages, _NO_THOUGHTS.sub("", content).strip()
        messages.append({"role": turn[1], "content": content})
    return messages, ""
