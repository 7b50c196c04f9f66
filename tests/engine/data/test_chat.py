"""What of a conversation is trained on, counted by hand for the styles of templates that are in use.

The tokenizer has a token for each byte and each special token.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chat_templates as styles

from tierstream.engine.data.codec import Codec, end_of_answer_id
from tierstream.engine.data.files import cut_jobs, fingerprint_files
from tierstream.engine.data.samples import UNTRAINED, Recipe, SampleMaker
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.io.errors import ConfigError, DataError

Turn = tuple[str, str]
#: Prompts between < and >, answers between = and =, as the texts that tokens of one kind decode to.
Runs = list[tuple[bool, str]]

TWO_TURNS: list[Turn] = [("user", "Hi"), ("assistant", "Yo!"), ("user", "é"), ("assistant", "Bye")]
WITH_SYSTEM: list[Turn] = [("system", "Be."), *TWO_TURNS]


def make(
    folder: Path, template: str, records: list[dict[str, Any]], **recipe: Any
) -> tuple[list[np.ndarray], Any]:
    """The samples of records, and the counts."""
    directory = styles.byte_tokenizer(
        folder / "tokenizer", eos="</s>" if "eos_token" in template else "<|endoftext|>"
    )
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (job,) = cut_jobs(fingerprint_files([path])[0])
    codec = Codec.of(load_tokenizer(directory))
    maker = SampleMaker(Recipe(str(directory), chat_template=template, **recipe), codec, vocab_size=300)
    pieces = list(maker.make(job))
    assert all(piece.last for piece in pieces)
    return [piece.ids for piece in pieces], maker.counts


def decoded(folder: Path, ids: np.ndarray) -> Runs:
    """Runs of tokens of one kind as (trained, text)."""
    codec = Codec.of(load_tokenizer(folder / "tokenizer"))
    trained = (ids & UNTRAINED) == 0
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    plain = ids & ~UNTRAINED
    return [(bool(trained[a]), codec.decode(plain[a:b].tolist())) for a, b in pairwise(edges)]


def conversation(turns: list[Turn]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# Tokens by hand: a special is 1, a byte is 1, é is 2.
STYLES: dict[str, tuple[str, list[Turn], Runs, int, int]] = {
    "chatml": (
        styles.CHATML,
        TWO_TURNS,
        [
            (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),  # 1+5+2+1+1 + 1+10
            (True, "Yo!<|im_end|>"),  # 4
            (False, "\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"),  # 1 + 10 + 11
            (True, "Bye<|im_end|>"),  # 4
            (False, "\n"),
        ],
        21 + 4 + 22 + 4 + 1,
        8,
    ),
    "llama 3": (
        styles.LLAMA3,
        WITH_SYSTEM,
        [
            (
                False,
                "<s><|start_header_id|>system<|end_header_id|>\n\nBe.<|eot_id|>"  # 1 + 1+6+1+2+3+1
                "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"  # 1+4+1+2+2+1
                "<|start_header_id|>assistant<|end_header_id|>\n\n",  # 1+9+1+2
            ),
            (True, "Yo!<|eot_id|>"),
            (
                False,
                "<|start_header_id|>user<|end_header_id|>\n\né<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
            ),
            (True, "Bye<|eot_id|>"),
        ],
        15 + 11 + 13 + 4 + 11 + 13 + 4,
        8,
    ),
    "mistral": (
        styles.MISTRAL,
        WITH_SYSTEM,
        [
            (False, "<s>[INST] Be.\n\nHi [/INST]"),  # 1+1+1+3+2+2+1+1
            (True, " Yo!</s>"),  # 5
            (False, "[INST] é [/INST]"),  # 1+1+2+1+1
            (True, " Bye</s>"),
        ],
        12 + 5 + 6 + 5,
        10,
    ),
    "gemma": (
        styles.GEMMA,
        TWO_TURNS,
        [
            (False, "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),  # 1 + 10 + 1+6
            (True, "Yo!<end_of_turn>"),
            (False, "\n<start_of_turn>user\né<end_of_turn>\n<start_of_turn>model\n"),
            (True, "Bye<end_of_turn>"),
            (False, "\n"),
        ],
        18 + 4 + 18 + 4 + 1,
        8,
    ),
    "zephyr": (
        styles.ZEPHYR,
        TWO_TURNS,
        [
            (False, "<|user|>\nHi</s>\n<|assistant|>\n"),  # 9+2+1+1 + 14
            (True, "Yo!</s>"),
            (False, "\n<|user|>\né</s>\n<|assistant|>\n"),
            (True, "Bye</s>"),
            (False, "\n"),
        ],
        27 + 4 + 28 + 4 + 1,
        8,
    ),
    "phi": (
        styles.PHI,
        TWO_TURNS,
        [
            (False, "<|user|>\nHi<|end|>\n<|assistant|>\n"),
            (True, "Yo!<|end|>"),
            (False, "\n<|user|>\né<|end|>\n<|assistant|>\n"),
            (True, "Bye<|end|>"),
            (False, "\n</s>"),
        ],
        27 + 4 + 28 + 4 + 2,
        8,
    ),
    "marked": (
        styles.MARKED,
        WITH_SYSTEM,
        [
            (
                False,
                "<|im_start|>system\nBe.<|im_end|>\n"  # 1+7+3+1+1
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            ),
            (True, "Yo!<|im_end|>"),
            (False, "\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"),
            (True, "Bye<|im_end|>"),
            (False, "\n"),
        ],
        13 + 21 + 4 + 22 + 4 + 1,
        8,
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_trained_on_up_to_the_end_of_their_turn(tmp_path: Path, style: str) -> None:
    template, turns, runs, tokens, trained = STYLES[style]
    (ids,), counts = make(tmp_path, template, [conversation(turns)])
    assert decoded(tmp_path, ids) == runs
    assert (len(ids), int(((ids & UNTRAINED) == 0).sum())) == (tokens, trained)
    assert (counts.samples, counts.rewritten, counts.by_format) == (1, 0, {"messages": 1})


@pytest.mark.parametrize("style", STYLES)
def test_everything_is_trained_on_when_asked(tmp_path: Path, style: str) -> None:
    template, turns, runs, tokens, _ = STYLES[style]
    (ids,), _ = make(tmp_path, template, [conversation(turns)], train_on="everything")
    assert decoded(tmp_path, ids) == [(True, "".join(text for _, text in runs))]
    assert len(ids) == tokens


THINKING: list[Turn] = [
    ("user", "Hi"),
    ("assistant", "<think>\na\n</think>\n\nYo!"),
    ("user", "é"),
    ("assistant", "<think>b</think>Bye"),
    ("user", "ok"),
    ("assistant", "End"),
]


def test_turns_rendered_anew_become_samples_as_the_model_saw_them(tmp_path: Path) -> None:
    """The thoughts of earlier turns are dropped, so the conversation is three samples (C47)."""
    samples, counts = make(tmp_path, styles.QWEN3, [conversation(THINKING)])
    first = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    second = first + "Yo!<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    third = second + "Bye<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert [decoded(tmp_path, ids) for ids in samples] == [
        [(False, first), (True, "<think>\na\n</think>\n\nYo!<|im_end|>")],
        [(False, second), (True, "<think>\nb\n</think>\n\nBye<|im_end|>")],
        [(False, third), (True, "<think>\n\n</think>\n\nEnd<|im_end|>")],
    ]
    # 7+1+1+1+8+2 and answer and end of turn; the empty thought has one byte less
    assert [int(((ids & UNTRAINED) == 0).sum()) for ids in samples] == [24, 24, 23]
    assert (counts.records, counts.samples, counts.rewritten) == (1, 3, 1)


def test_the_last_turn_alone_or_none_when_asked(tmp_path: Path) -> None:
    (ids,), counts = make(tmp_path, styles.QWEN3, [conversation(THINKING)], rewritten_turns="last")
    assert decoded(tmp_path, ids)[-1] == (True, "<think>\n\n</think>\n\nEnd<|im_end|>")
    assert (len(decoded(tmp_path, ids)), counts.rewritten) == (2, 1)
    with pytest.raises(DataError, match=r"chat\.jsonl:1: .* renders answer 1 in another way once more turns"):
        make(tmp_path, styles.QWEN3, [conversation(THINKING)], rewritten_turns="error")


def test_a_system_text_that_moves_makes_samples_of_their_own(tmp_path: Path) -> None:
    samples, _ = make(tmp_path, styles.MISTRAL_MOVING, [conversation(WITH_SYSTEM)])
    assert [decoded(tmp_path, ids) for ids in samples] == [
        [(False, "<s>[INST] Be.\n\nHi [/INST]"), (True, " Yo!</s>")],
        [(False, "<s>[INST] Hi [/INST] Yo!</s>[INST] Be.\n\né [/INST]"), (True, " Bye</s>")],
    ]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"x": {"type": "string"}}}}


def test_tools_calls_and_their_results(tmp_path: Path) -> None:
    """Arguments as JSON text or as an object, nulls in them kept, null content empty (C39)."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": {"x": None, "y": "None"}},
    }
    as_text = {"function": {"name": "look", "arguments": '{"x": null, "y": "None"}'}}
    texts = []
    for each in (call, as_text):
        messages = [
            {"role": "user", "content": "Hi", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [each]},
            {"role": "tool", "content": '{"ok": true}', "name": None},
            {"role": "assistant", "content": "Yes"},
        ]
        (ids,), _ = make(
            tmp_path, styles.QWEN3, [{"messages": messages, "tools": [TOOL]}], train_on="everything"
        )
        texts.append(decoded(tmp_path, ids)[0][1])
        samples, _ = make(tmp_path, styles.QWEN3, [{"messages": messages, "tools": [TOOL]}])
        answers = [decoded(tmp_path, ids)[-1] for ids in samples]
        # The call has no thought in front when it is not last: so it is rendered anew.
        written = (
            '\n<tool_call>\n{"name": "look", "arguments": {"x": null, "y": "None"}}\n</tool_call><|im_end|>'
        )
        assert answers == [
            (True, f"<think>\n\n</think>\n\n{written}"),
            (True, "<think>\n\n</think>\n\nYes<|im_end|>"),
        ]
        # An empty thought has 19 bytes; the call 1+11+1, its JSON 55, 1+12; each turn an end.
        trained = [int(((ids & UNTRAINED) == 0).sum()) for ids in samples]
        assert trained == [19 + 13 + 55 + 13 + 1, 19 + 3 + 1]
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>user\nHi")
    assert '<tool_response>\n{"ok": true}\n</tool_response>' in texts[0]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (styles.GEMMA, WITH_SYSTEM, r"the chat template fails: No system role \(TemplateError\)"),
        (styles.GEMMA, [("user", "a"), ("user", "b"), ("assistant", "c")], "Roles must alternate"),
        ("{{ messages[0].nothing.more }}", TWO_TURNS, "the chat template fails: .*nothing"),
        (styles.CHATML.replace("{{ message.content }}", "{{ message.get('name') }}"), TWO_TURNS, "word None"),
        (styles.MISTRAL.replace("ns.system +", ""), WITH_SYSTEM, "leaves out or changes 'Be.' of message 1"),
        (styles.CHATML.replace("content }}", "content[:2] }}"), TWO_TURNS, "changes 'Yo!' of message 2"),
        (
            styles.CHATML.replace("<|im_start|>assistant", "<|im_start|>bot"),
            TWO_TURNS,
            "message 2 is an answer that the chat template begins in another way",
        ),
        (
            styles.MARKED.replace("message.role == 'assistant'", "loop.last"),
            TWO_TURNS,
            r"marks 1 parts with \{% generation %\}, but there are 2 answers",
        ),
        (
            styles.MARKED.replace(
                "{% generation %}{{ message.content }}", "{{ message.content }}{% generation %}"
            ),
            TWO_TURNS,
            "are not around the answers",
        ),
    ],
)
def test_a_template_that_does_not_say_it_all_is_refused(
    tmp_path: Path, template: str, messages: list[Turn], words: str
) -> None:
    with pytest.raises(DataError, match=rf"chat\.jsonl:1: .*{words}"):
        make(tmp_path, template, [conversation(messages)])


def test_thoughts_and_tools_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    thinking = {"role": "assistant", "content": "b", "reasoning_content": "because"}
    with pytest.raises(DataError, match="leaves out or changes 'because' of message 2"):
        make(tmp_path, styles.CHATML, [{"messages": [{"role": "user", "content": "a"}, thinking]}])
    (ids,), _ = make(tmp_path, styles.QWEN3, [{"messages": [{"role": "user", "content": "a"}, thinking]}])
    assert decoded(tmp_path, ids)[1] == (True, "<think>\nbecause\n</think>\n\nb<|im_end|>")
    with pytest.raises(DataError, match="leaves out the tool 'look'"):
        make(tmp_path, styles.CHATML, [conversation(TWO_TURNS) | {"tools": [TOOL]}])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    with pytest.raises(DataError, match="leaves out or changes 'look' of message 2"):
        make(tmp_path, styles.CHATML, [{"messages": [{"role": "user", "content": "a"}, call]}])


def test_without_an_end_of_turn_token_the_text_ends_with_end_of_text(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (ids,), _ = make(tmp_path, template, [conversation(TWO_TURNS[:2])])
    assert decoded(tmp_path, ids) == [(False, "user: Hi\nassistant: "), (True, "Yo!\n<|endoftext|>")]
    (ids,), _ = make(tmp_path, template, [conversation(TWO_TURNS[:3])])
    assert decoded(tmp_path, ids)[-1] == (False, "user: é\n<|endoftext|>")


def test_weight_0_and_a_prompt_of_messages_are_context(tmp_path: Path) -> None:
    record = conversation(TWO_TURNS)
    record["messages"][1]["weight"] = 0
    (ids,), _ = make(tmp_path, styles.CHATML, [record])
    assert [text for trained, text in decoded(tmp_path, ids) if trained] == ["Bye<|im_end|>"]
    messages = conversation(TWO_TURNS)["messages"]
    for template in (styles.CHATML, styles.MARKED):
        (ids,), counts = make(tmp_path, template, [{"prompt": messages[:3], "completion": messages[3:]}])
        assert [text for trained, text in decoded(tmp_path, ids) if trained] == ["Bye<|im_end|>"]
        assert counts.by_format == {"prompt": 1}


def test_the_date_of_a_template_is_always_the_same(tmp_path: Path) -> None:
    (ids,), _ = make(tmp_path, "{{ strftime_now('%d %b %Y') }} " + styles.CHATML, [conversation(TWO_TURNS)])
    assert decoded(tmp_path, ids)[0][1].startswith("01 Jan 2026 <|im_start|>user")


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (styles.CHATML, "<|im_end|>"),
        (styles.MARKED, "<|im_end|>"),
        (styles.LLAMA3, "<|eot_id|>"),
        (styles.MISTRAL, "</s>"),
        (styles.GEMMA, "<end_of_turn>"),
        (styles.PHI, "<|end|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('No') }}", None),
        ("{{ messages", None),
    ],
)
def test_token_at_which_an_answer_ends(tmp_path: Path, template: str, end: str | None) -> None:
    eos = "</s>" if template == styles.MISTRAL else "<|endoftext|>"
    tokenizer = load_tokenizer(styles.byte_tokenizer(tmp_path, eos=eos))
    found = end_of_answer_id(tokenizer, template)
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == end


def test_what_is_no_template_is_no_fault_of_the_records(tmp_path: Path) -> None:
    """So they are not skipped either."""
    said = r"^the chat template is no Jinja template: line 2: .*; correct it, or name a file with another one"
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, "a\n{% if", [conversation(TWO_TURNS)], bad_lines="skip")
