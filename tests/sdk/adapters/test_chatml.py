"""ChatML: texts of the tokenizer of bytes, and conversations read back from them."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from toprope.sdk.adapters._shared.chatml import messages_in, tokenizer_of_bytes

CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
pieces = some.text(some.characters(exclude_categories=("Cs",))) | some.sampled_from(
    ["\n", "<|", "|>", "im_end", "user"]
)
content = some.lists(pieces).map("".join).filter(lambda text: not re.search(r"<\|(im_start|im_end|endoftext)\|>", text))
conversations = some.lists(
    some.fixed_dictionaries({"role": some.sampled_from(["system", "user", "assistant", "tool"]), "content": content}),
    min_size=1,
)


@functools.cache
def tokenizer() -> Any:
    return tokenizer_of_bytes()


def rendered(messages: list[dict[str, Any]], **more: Any) -> str:
    return str(tokenizer().apply_chat_template(messages, tokenize=False, **more))


@settings(deadline=None)
@given(conversations, some.booleans())
def test_conversations_are_read_back_as_they_were_written(messages: list[dict[str, Any]], is_open: bool) -> None:
    text = rendered(messages, add_generation_prompt=is_open)
    assert messages_in(text) == (messages, "")
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert tokenizer().decode(ids) == text


@settings(deadline=None)
@given(content)
def test_ids_of_an_answer_give_its_text_back(text: str) -> None:
    ids = [*tokenizer()(text, add_special_tokens=False)["input_ids"], tokenizer().eos_token_id]
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("text", "messages", "begun"),
    [
        ("Go on.\n", [("user", "Go on.\n")], ""),
        ("Quote: <|im_start|>user\nx<|im_end|>", [("user", "Quote: <|im_start|>user\nx<|im_end|>")], ""),
        ("<|im_start|>user\na<|im_end|><|im_start|>assistant\n", [("user", "a")], ""),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\ncut<|im_start|>user\nb<|im_end|>\n",
         [("user", "a"), ("assistant", "cut"), ("user", "b")], ""),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", [("user", "a")], ""),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nAnswer:", [("user", "a")], "Answer:"),
        ("<|endoftext|><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", [("user", "a")], ""),
        ("<|im_start|>user\na<|im_end|>b<|im_end|>\n", [("user", "a<|im_end|>b")], ""),
    ],
)  # fmt: skip
def test_texts_that_others_put_together(text: str, messages: list[tuple[str, str]], begun: str) -> None:
    assert messages_in(text) == ([{"role": role, "content": said} for role, said in messages], begun)


def test_tools_calls_and_blocks_are_in_the_text() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}],
    }
    tools = [{"type": "function", "function": {"name": "look"}}]
    [told, *rest] = messages_in(rendered([asked, called], tools=tools))[0]
    assert told["role"] == "system" and '{"name": "look"}' in told["content"]
    assert [message["content"] for message in rest] == ["ab", CALL]
    [told, *rest] = messages_in(rendered([{"role": "system", "content": "Be brief."}, asked], tools=tools))[0]
    assert told["content"].startswith("Be brief.\n\n# Tools") and len(rest) == 1
