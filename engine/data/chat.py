"""Conversations as the text that a chat template makes of them, and which parts of it the model wrote.

The template is asked, nothing is guessed: before each answer it renders the prompt, after it the answer, as
it would at inference; the answer is what is between. Where it renders a turn in another way once more turns
follow, the conversation is cut into samples that each are what the model saw.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import read_text
from tierstream.engine.data.formats import Conversation, Message
from tierstream.io.errors import ConfigError, DataError, TierstreamError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BLOCK, _QUOTED = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL), re.compile(r"'[^']*'|\"[^\"]*\"")
_NONE = re.compile(r"\bNone\b")
#: Fields of a message that hold what the model thought.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
#: What a template that asks for the date is told, so that it gives the same text every day.
TODAY = datetime.date(2026, 1, 1)


def given_template(data: DataConfig) -> str | None:
    """The template in the file `data.chat_template`; None: none is named. Raises DataError: it cannot be
    read.
    """
    if data.chat_template is None:
        return None
    try:
        return "".join(read_text(Path(data.chat_template)))
    except DataError as error:
        raise DataError(
            f"data.chat_template: {error}; name a file with a Jinja template, or leave it out for the "
            "tokenizer's"
        ) from error


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text as the model sees it.

    Attributes:
        spans: characters [begin, end) that are trained on, ascending.
        rewritten: the template renders earlier turns of this conversation anew.
    """

    text: str
    spans: list[tuple[int, int]]
    rewritten: bool = False


class ChatTemplate:
    """A Jinja template, rendered by transformers.

    Args:
        special_tokens: what the template knows by name, such as eos_token.
        special_texts: the texts of all special tokens.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], special_texts: Sequence[str]) -> None:
        self._source = _NOW.sub(lambda call: json.dumps(TODAY.strftime(call[2])), source)
        self._special_tokens = special_tokens
        special = "|".join(map(re.escape, special_texts)) or "(?!)"
        # The end of a turn, and what some templates put behind it: a line feed, also an end of text.
        self._turn_end = re.compile(rf"({special})(?:{special})*((?:\s(?:\s|{special})*)?)\Z")
        self._marked = _MARK.search(source) is not None
        said = _BLOCK.sub(lambda block: " ".join(_QUOTED.findall(block[0])), source)
        self._says_none = _NONE.search(said) is not None

    def render(self, conversation: Conversation, *, answers: bool, rewritten_turns: str) -> list[Rendered]:
        """The samples of a conversation.

        Args:
            answers: train on what the assistant says; False: on everything.
            rewritten_turns: split, last or error, as `DataConfig.rewritten_turns`.

        Raises:
            ConfigError: the template is no Jinja.
            DataError: the template fails, leaves something out, renders None as a word, or begins an answer
                in another way than its prompt ends; earlier turns are rendered anew and that is an error.
        """
        whole, marks = self._run(conversation, len(conversation.messages), marks=self._marked)
        self._check(conversation, whole)
        if not answers:
            return [Rendered(whole, [(0, len(whole))])]
        if self._marked:
            return [Rendered(whole, self._marks(conversation, whole, marks))]
        turns = [
            self._turn(conversation, number, whole)
            for number, message in enumerate(conversation.messages)
            if number >= conversation.context and _is_answer(message)
        ]
        if all(whole.startswith(turn.text) for turn in turns):
            return [Rendered(whole, [turn.spans[0] for turn in turns])]
        if rewritten_turns == "error":
            number = next(i for i, turn in enumerate(turns) if not whole.startswith(turn.text))
            raise DataError(
                f"the chat template renders answer {number + 1} in another way once more turns follow; say "
                "with data.rewritten_turns what to do (split or last)"
            )
        chosen = turns[-1:] if rewritten_turns == "last" else turns
        return [Rendered(turn.text, turn.spans, rewritten=True) for turn in chosen]

    def prompt(self, conversation: Conversation) -> str:
        """What the model sees when it is to answer. Raises ConfigError, DataError: as `render`."""
        return self._run(conversation, len(conversation.messages), prompt=True)[0]

    def end_of_answer(self) -> str | None:
        """The special token at which a model stops that was trained on answers of this template; None: it
        says none.
        """
        asked = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        try:
            answer = self._turn(asked, 1, self._run(asked, 2)[0])
        except TierstreamError:
            return None
        found = self._turn_end.search(answer.text, answer.spans[0][0])
        return found[1] if found else None

    def _run(
        self, conversation: Conversation, turns: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render the first `turns` messages; `prompt`: and what an answer begins with."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its annotation says less than it returns
        try:
            texts, spans = render(
                conversations=[conversation.messages[:turns]],
                tools=conversation.tools,
                chat_template=self._source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self._special_tokens,
            )
        except TemplateSyntaxError as error:  # whatever the record
            raise ConfigError(
                f"the chat template is no Jinja template: line {error.lineno}: {error.message}; correct it, "
                "or name a file with another one (data.chat_template)"
            ) from error
        except Exception as error:  # whatever the code in a template raises
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"the chat template fails: {reason} ({type(error).__name__})") from error
        return texts[0], spans[0] if marks else []

    def _turn(self, conversation: Conversation, number: int, whole: str) -> Rendered:
        """Message `number`, an answer, as the model writes it: up to its end-of-turn token if it has one."""
        message = conversation.messages[number]
        prompt, _ = self._run(conversation, number, prompt=True)
        last = number + 1 == len(conversation.messages)
        text = whole if last else self._run(conversation, number + 1)[0]
        if not text.startswith(prompt):
            raise DataError(
                f"message {number + 1} is an answer that the chat template begins in another way than its "
                "generation prompt; mark answers in the template: {% generation %}...{% endgeneration %}"
            )
        if found := self._turn_end.search(text, len(prompt)):
            text = text[: found.start(2)]
        said = _dense(text)
        thoughts = [message[name] for name in _REASONING if isinstance(message.get(name), str)]
        for part in (message["content"], *thoughts):
            if _dense(part) not in said:
                raise _left_out(number, part)
        return Rendered(text, [(len(prompt), len(text))])

    def _marks(
        self, conversation: Conversation, whole: str, marks: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The template's own marks, without those of messages that are context."""
        answers = [each for each in conversation.messages if each["role"] == "assistant"]
        if len(marks) != len(answers):
            raise DataError(
                f"the chat template marks {len(marks)} parts with {{% generation %}}, but there are "
                f"{len(answers)} answers"
            )
        for answer, (begin, end) in zip(answers, marks, strict=True):
            if _find(_spoken(answer), _dense(whole[begin:end]), 0) < 0:
                raise DataError("the marks {% generation %} of the chat template are not around the answers")
        if not all(map(_is_answer, answers)):
            raise DataError("an answer has weight 0, but the chat template marks answers itself")
        if not conversation.context:
            return marks
        context, _ = self._run(conversation, conversation.context)
        if not whole.startswith(context):
            raise DataError("the chat template renders the prompt anew in front of the completion")
        return [(begin, end) for begin, end in marks if begin >= len(context)]

    def _check(self, conversation: Conversation, whole: str) -> None:
        """Raises DataError: something of the conversation is not in the text, or None is there as a word."""
        if not self._says_none and (found := len(_NONE.findall(whole))):
            given = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
            if found > len(_NONE.findall(given)):
                raise DataError("the chat template renders a missing value as the word None")
        said = _dense(whole)
        for tool in conversation.tools or []:
            if (name := tool["function"]["name"]) not in said:
                raise DataError(f"the chat template leaves out the tool {name!r}; it may not support tools")
        at = 0
        for number, message in enumerate(conversation.messages):
            content = _spoken(message)  # templates drop the thoughts of earlier turns
            moved = message["role"] in ("system", "developer")  # or may be
            end = _find(content, said, 0 if moved else at)
            if end < 0:
                raise _left_out(number, content)
            at = at if moved else end
            for call in message.get("tool_calls", []):
                if call["function"]["name"] not in said:
                    raise _left_out(number, call["function"]["name"])


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _spoken(message: Message) -> str:
    """What a message says; of an answer without what the model thought."""
    content: str = message["content"]
    return content.rpartition("</think>")[2] if message["role"] == "assistant" else content


def _dense(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())


def _find(content: str, said: str, begin: int) -> int:
    """Where `content`, as it is or as a JSON string, ends in `said`; -1: nowhere."""
    dense = _dense(content)
    found = said.find(dense, begin)
    for ascii_only in (False, True):
        if found < 0:
            dense = _dense(json.dumps(content.strip(), ensure_ascii=ascii_only)[1:-1])
            found = said.find(dense, begin)
    return found + len(dense) if found >= 0 else -1


def _left_out(number: int, part: str) -> DataError:
    short = part if len(part) <= 40 else part[:40] + "..."
    return DataError(f"the chat template leaves out or changes {short!r} of message {number + 1}")
