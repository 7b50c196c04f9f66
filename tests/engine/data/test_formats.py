"""Which format a record has, and what becomes of its fields."""

from __future__ import annotations

from typing import Any

import pytest

from tierstream.engine.data.formats import Completion, Conversation, Plain, recognise, to_sample
from tierstream.io.errors import DataError


def sample(value: dict[str, Any], *, chat: bool = True, text_field: str = "text") -> Any:
    return to_sample(value, recognise(value, text_field), text_field, chat=chat)


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(
    ("value", "format"),
    [
        ({"text": "", "id": 1}, "text"),
        ({"prompt": "a", "completion": "b"}, "prompt"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"messages": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"conversations": [{"role": "user"}], "text": None, "prompt": "a"}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_record_is_recognised_by_its_fields(value: dict[str, Any], format: str) -> None:
    assert recognise(value, "text") == format


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, r"no format fits the fields \(none\); known are text"),
        (
            {"question": "a", "text": None},
            r"the fields \(question, text \(null\)\); known are .*alpaca.*sharegpt",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"\(prompt, chosen, rejected\)"),
        (
            {"text": "a", "messages": []},
            r"\(text, messages\) fit several formats \(text, messages\); .*data\.format",
        ),
        ({"messages": [], "conversations": []}, r"fit several formats \(messages\)"),
        ({"messages": "[]"}, "no format fits"),
    ],
)
def test_what_cannot_be_recognised_is_named(value: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        recognise(value, "text")


def test_plain_text_from_the_field_asked_for() -> None:
    assert sample({"body": "a"}, text_field="body") == Plain("a")
    with pytest.raises(DataError, match=r"'text' is missing or null where a text is expected \(fields: x\)"):
        to_sample({"x": 1}, "text", "text", chat=False)
    with pytest.raises(DataError, match="'text' is of type int"):
        to_sample({"text": 1}, "text", "text", chat=False)


def test_alpaca_is_a_conversation_or_a_completion() -> None:
    value = {
        "instruction": "Add.",
        "input": "1 2",
        "output": "3",
        "system": "Be.",
        "history": [["Hi", "Yo"]],
    }
    assert said(sample(value)) == [
        ("system", "Be."),
        ("user", "Hi"),
        ("assistant", "Yo"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]
    assert sample(value, chat=False) == Completion(
        "Be.\n\n### Instruction:\nHi\n\n### Response:\nYo\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n",
        "3",
    )
    bare = {"instruction": "Add.", "input": None, "output": "3", "system": None, "history": None}
    assert said(sample(bare)) == [("user", "Add."), ("assistant", "3")]
    assert sample(bare, chat=False) == Completion("### Instruction:\nAdd.\n\n### Response:\n", "3")
    with pytest.raises(DataError, match="history must be a list of pairs"):
        sample(value | {"history": [["Hi"]]})


def test_prompt_and_completion_are_texts_or_messages() -> None:
    assert sample({"prompt": "a", "completion": "b"}) == Completion("a", "b")
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert sample({"prompt": [user], "completion": [answer]}) == Conversation([user, answer], None, 1)
    with pytest.raises(DataError, match="both be texts, or both be lists"):
        sample({"prompt": [user], "completion": "b"})
    with pytest.raises(DataError, match="'completion' is of type int"):
        sample({"prompt": "a", "completion": 1})


def test_sharegpt_with_tools() -> None:
    value = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"x": null}}'},
            {"from": "observation", "value": "seen"},
            {"from": "gpt", "value": "b"},
        ],
        "system": "Be.",
        "tools": '[{"name": "look", "parameters": {"x": null, "y": [{"z": null, "w": 1}]}}]',
    }
    conversation = sample(value)
    assert said(conversation) == [
        ("system", "Be."),
        ("user", "a"),
        ("assistant", ""),
        ("tool", "seen"),
        ("assistant", "b"),
    ]
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": None}}}
    assert conversation.messages[2]["tool_calls"] == [call]
    function = {"name": "look", "parameters": {"y": [{"w": 1}]}}
    assert conversation.tools == [{"type": "function", "function": function}]


def test_nulls_go_from_messages_and_calls_but_not_from_arguments() -> None:
    call = {
        "id": None,
        "type": None,
        "function": {"name": "f", "arguments": {"a": None, "b": [None]}, "x": None},
    }
    value = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "image": None}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
            {"role": "tool", "content": {"n": None}, "tool_calls": None},
            {"role": "assistant", "tool_calls": [{"name": "g", "arguments": ""}]},
        ],
        "tools": None,
    }
    assert sample(value) == Conversation(
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": [None]}}}
                ],
            },
            {"role": "tool", "content": '{"n": null}'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {}}}],
            },
        ]
    )


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        ([], {}, "no message is of the assistant"),
        ([USER], {}, "no message is of the assistant"),
        (["a"], {}, "a message is of type str where an object"),
        ([{"role": "bot", "content": "a"}], {}, "the role of a message is 'bot'; known are human"),
        ([{"content": "a"}], {}, "the role of a message is None"),
        ([{"role": "user"}, ANSWER], {}, r"a message \(user\) has no content; its fields are role"),
        ([{"role": "assistant", "t": "a"}], {}, r"\(assistant\) has no content; its fields are role, t"),
        ([{"role": "assistant", "content": None}], {}, r"\(assistant\) has null as its content and no tool"),
        ([{"from": "gpt", "value": None}], {}, r"\(gpt\) has null as its content"),
        ([{"role": "function_call"}], {}, r"\(function_call\) has no content"),
        ([{"role": "function_call", "content": None}], {}, "the function_call are no JSON"),
        ([{"from": "gpt", "text": "a"}], {}, r"\(gpt\) has no content; its fields are from, text"),
        ([ANSWER | {"weight": 0.5}], {}, r"the weight of a message \(assistant\) is 0\.5; it must be 0 or 1"),
        ([{"role": ["user"]}], {}, "the role of a message is"),
        ([{"role": "user", "content": 1}], {}, r"content of a message \(user\) is of type int"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            {},
            r"content of a message \(user\) is of type dict",
        ),
        (
            [{"role": "user", "content": [{"text": "a"}] * 2}],
            {},
            r"content of a message \(user\) is of type list",
        ),
        ([ANSWER | {"tool_calls": ["f"]}], {}, "a tool call is of type str"),
        ([ANSWER | {"tool_calls": [{"name": None}]}], {}, "'name' is missing or null"),
        (
            [ANSWER | {"tool_calls": [{"name": "f", "arguments": "{"}]}],
            {},
            "arguments of a tool call are no JSON",
        ),
        ([ANSWER | {"tool_calls": [{"name": "f", "arguments": '"\\ud800"'}]}], {}, r"lone surrogate \\ud800"),
        ([ANSWER | {"tool_calls": [{"name": "f", "arguments": [1]}]}], {}, "of type list, not an object"),
        ([{"from": "function_call", "value": "look"}], {}, "function_call are no JSON"),
        ([USER, ANSWER], {"tools": "{"}, "the tools are no JSON"),
        ([USER, ANSWER], {"tools": [1]}, "a tool is of type int"),
        (
            [USER, ANSWER],
            {"tools": [{"function": "f", "x": 1}]},
            "a tool has no name; its fields are function, x",
        ),
        ([USER, ANSWER], {"tools": {"name": "f"}}, "tools is of type dict where a list"),
        ([{"role": "system", "content": "s"}, ANSWER], {"system": "t"}, "a field system and a first message"),
    ],
)
def test_what_is_no_conversation_is_named(messages: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        to_sample({"messages": messages, **more}, "messages", "text", chat=True)
