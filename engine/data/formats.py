"""What a record is: a plain text, a prompt with its completion, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tierstream.engine.data.records import parse_json
from tierstream.io.errors import DataError

Format = Literal["text", "prompt", "alpaca", "sharegpt", "messages"]
Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_call": "function_call",
}
_KNOWN = (
    "prompt and completion; instruction and output (alpaca); conversations of from and value (sharegpt); "
    "messages of role and content"
)


@dataclass(frozen=True, slots=True)
class Plain:
    """A text, trained on as a whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A text of two parts; the second is the answer."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them: role, content (always a string), perhaps tool_calls and more; no
    value is None but inside the arguments of tool calls.

    Attributes:
        tools: JSON schemas of what may be called.
        context: so many messages at the start are never trained on.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    context: int = 0


Sample = Plain | Completion | Conversation


def recognise(value: Mapping[str, Any], text_field: str) -> Format:
    """The format of a record by its fields; those that are null count as missing.

    Raises:
        DataError: there is none, or more than one; with the fields found and the formats known.
    """
    there = {name for name, field in value.items() if field is not None}
    found: list[Format] = []
    if text_field in there:
        found.append("text")
    if {"prompt", "completion"} <= there:
        found.append("prompt")
    if {"instruction", "output"} <= there:
        found.append("alpaca")
    for name in ("conversations", "messages"):
        if isinstance(turns := value.get(name), list):
            sharegpt = bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]
            found.append("sharegpt" if sharegpt else "messages")
    if len(found) == 1:
        return found[0]
    fields = ", ".join(f"{name}{'' if name in there else ' (null)'}" for name in value) or "none"
    if found:
        raise DataError(
            f"the fields ({fields}) fit several formats ({', '.join(dict.fromkeys(found))}); choose one with "
            "data.format"
        )
    raise DataError(
        f"no format fits the fields ({fields}); known are {text_field} (data.text_field); {_KNOWN}"
    )


def to_sample(value: Mapping[str, Any], format: str, text_field: str, *, chat: bool) -> Sample:
    """The sample that a record of `format` is.

    Args:
        chat: there is a chat template; without one alpaca records become completions.

    Raises:
        DataError: a field is missing or has another type, a role is unknown, ...; names the field.
    """
    if format == "text":
        return Plain(_text(value, text_field))
    if format == "prompt":
        return _prompt(value)
    if format == "alpaca":
        return _alpaca(value, chat)
    return _conversation(value)


def _text(value: Mapping[str, Any], name: str, *, optional: bool = False) -> str:
    text = value.get(name)
    if text is None and optional:
        return ""
    if not isinstance(text, str):
        known = f" (fields: {', '.join(value)})" if text is None else ""
        raise DataError(f"{name!r} is {_named(text)} where a text is expected{known}")
    return text


def _named(value: Any) -> str:
    return "missing or null" if value is None else f"of type {type(value).__name__}"


def _prompt(value: Mapping[str, Any]) -> Sample:
    kinds = [type(value.get(name)) for name in ("prompt", "completion")]
    if kinds == [list, list]:
        prompt = [_message(each) for each in value["prompt"]]
        messages = prompt + [_message(each) for each in value["completion"]]
        return Conversation(_checked(messages), _tools(value), len(prompt))
    if list in kinds:
        raise DataError("prompt and completion must both be texts, or both be lists of messages")
    return Completion(_text(value, "prompt"), _text(value, "completion"))


def _alpaca(value: Mapping[str, Any], chat: bool) -> Sample:
    """`history` holds pairs of earlier instructions and outputs."""
    instruction, more = _text(value, "instruction"), _text(value, "input", optional=True)
    system, output = _text(value, "system", optional=True), _text(value, "output")
    history = value.get("history") or []
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise DataError("history must be a list of pairs of texts, [instruction, output]")
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        for question, answer in [*history, (f"{instruction}\n{more}" if more else instruction, output)]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Conversation(messages)
    prompt = f"{system}\n\n" if system else ""
    for question, answer in history:
        prompt += f"### Instruction:\n{question}\n\n### Response:\n{answer}\n\n"
    prompt += f"### Instruction:\n{instruction}\n\n"
    prompt += f"### Input:\n{more}\n\n" if more else ""
    return Completion(f"{prompt}### Response:\n", output)


def _conversation(value: Mapping[str, Any]) -> Conversation:
    """Both styles of messages, under both names of the field."""
    lists = [name for name in ("messages", "conversations") if value.get(name) is not None]
    if len(lists) != 1 or not isinstance(value[lists[0]], list):
        raise DataError(f"one list, messages or conversations, is expected; fields: {', '.join(value)}")
    turns = value[lists[0]]
    messages = [_message(turn) for turn in turns]
    system = _text(value, "system", optional=True)
    if system:
        if messages and messages[0]["role"] == "system":
            raise DataError("there is a field system and a first message of that role as well")
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(_checked(messages), _tools(value))


def _checked(messages: list[Message]) -> list[Message]:
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("no message is of the assistant")
    return messages


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"a message is {_named(turn)} where an object is expected")
    message = _without_null_fields(turn)
    if "from" in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", "")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"the role of a message is {role!r}; known are {', '.join(_ROLES)}")
    if not message.get("tool_calls") and not {"content", "value"} & turn.keys():
        raise DataError(f"a message ({role}) has no content; its fields are {', '.join(turn)}")
    message["role"] = _ROLES[role]
    if message["role"] == "assistant" and not message.get("tool_calls") and _says_null(turn):
        raise DataError(f"a message ({role}) has null as its content and no tool_calls: it is no answer")
    if message["role"] == "function_call":
        calls = _parsed(message.get("content"), "function_call")
        message |= {"role": "assistant", "tool_calls": calls, "content": ""}
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"the weight of a message ({role}) is {message['weight']!r}; it must be 0 or 1")
    message["content"] = _content(message)
    if tool_calls := message.pop("tool_calls", None):
        listed = tool_calls if isinstance(tool_calls, list) else [tool_calls]
        message["tool_calls"] = [_call(call) for call in listed]
    return message


def _says_null(turn: Message) -> bool:
    """Whether neither field of the text has any, which an empty one would be."""
    return turn.get("content") is None and turn.get("value") is None


def _content(message: Message) -> str:
    content = message.get("content", "")
    if isinstance(content, list) and len(content) <= 1:
        part = content[0] if content else ""
        content = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if message["role"] == "tool" and isinstance(content, dict | list | int | float):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise DataError(f"the content of a message ({message['role']}) is {_named(content)}, not one text")
    return content


def _call(call: Any) -> dict[str, Any]:
    """A tool call as templates take it: {"type": "function", "function": {"name", "arguments": {...}}}."""
    if not isinstance(call, dict):
        raise DataError(f"a tool call is {_named(call)} where an object is expected")
    call = _without_null_fields(call)
    if not isinstance(call.get("function"), dict):  # name and arguments themselves
        call = {"function": call}
    function = _without_null_fields(call["function"])
    _text(function, "name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", "arguments of a tool call")
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments of a tool call are {_named(arguments)}, not an object")
    # Nulls in here are the caller's own.
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _tools(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Schemas without the nulls that Arrow fills in, since a parameter of one tool becomes one of all."""
    tools = value.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"tools is {_named(tools)} where a list is expected")
    return [
        _tool(_without_nulls(_parsed(tool, "tools") if isinstance(tool, str) else tool)) for tool in tools
    ]


def _tool(tool: Any) -> dict[str, Any]:
    """A schema as templates take it: {"type": "function", "function": {"name", ...}}."""
    if not isinstance(tool, dict):
        raise DataError(f"a tool is {_named(tool)} where an object is expected")
    if not isinstance(tool.get("function"), dict):
        tool = {"type": "function", "function": tool}
    if not isinstance(tool["function"].get("name"), str):
        raise DataError(f"a tool has no name; its fields are {', '.join(tool['function'])}")
    return tool


def _without_null_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """Arrow fills in null where a field is missing."""
    return {name: field for name, field in value.items() if field is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in _without_null_fields(value).items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parsed(text: Any, what: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"the {what} are no JSON: {error}") from error
