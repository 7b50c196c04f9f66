"""From files to marked ids: what ends a sample, what is kept out, what is counted, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import chat_templates as styles
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from tierstream.engine.data.codec import Codec
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.encode import WINDOW_CHARS
from tierstream.engine.data.files import cut_jobs, fingerprint_files
from tierstream.engine.data.samples import PROBLEMS_MAX, UNTRAINED, Counts, Recipe, SampleMaker
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.io.errors import DataError

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each byte, and one for `ow`."""
    return styles.byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), merges=(("o", "w"),))


@pytest.fixture(scope="module")
def codec(directory: Path) -> Codec:
    return Codec.of(load_tokenizer(directory))


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path


def make(
    path: Path, codec: Codec, *, vocab_size: int = 300, **recipe: Any
) -> tuple[list[tuple[int, list[tuple[bool, str]]]], Counts]:
    """Samples as (line, runs of tokens of one kind as (trained, text)), and the counts."""
    maker = SampleMaker(Recipe("somewhere", **recipe), codec, vocab_size=vocab_size)
    (source,) = fingerprint_files([path])
    samples, ids = [], np.empty(0, np.uint32)
    for job in cut_jobs(source):
        for piece in maker.make(job):
            assert piece.ids.dtype == np.uint32
            ids = np.concatenate([ids, piece.ids])
            if piece.last:
                trained = (ids & UNTRAINED) == 0
                edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
                texts = [codec.decode((ids[a:b] & ~UNTRAINED).tolist()) for a, b in pairwise(edges)]
                samples.append((piece.line, list(zip(trained[edges[:-1]].tolist(), texts, strict=True))))
                ids = np.empty(0, np.uint32)
    assert not ids.size
    return samples, maker.counts


def test_texts_completions_and_what_is_empty(tmp_path: Path, codec: Codec) -> None:
    """The end-of-text of an answer is trained on, one inside of a prompt is not (C37)."""
    records = [
        {"text": "ab"},
        {"text": ""},
        {"prompt": f"a{END}", "completion": "b c"},
        {"prompt": "", "completion": ""},
        {"prompt": "a", "completion": ""},
        {"instruction": "x", "output": "y"},
    ]
    path = write(tmp_path / "a.jsonl", records)
    samples, counts = make(path, codec)
    assert samples == [
        (1, [(True, f"ab{END}")]),
        (3, [(False, f"a{END}"), (True, f"b c{END}")]),
        (5, [(False, "a"), (True, END)]),
        (6, [(False, "### Instruction:\nx\n\n### Response:\n"), (True, f"y{END}")]),
    ]
    assert counts == Counts(records=6, samples=4, empty=2, by_format={"text": 2, "prompt": 3, "alpaca": 1})
    everything, _ = make(path, codec, train_on="everything")
    assert everything[1] == (3, [(True, f"a{END}b c{END}")])


def test_what_the_tokenizer_puts_in_front_is_of_the_prompt(tmp_path: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    records = [
        {"text": "ab"},
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "assistant", "content": "c"}]},
    ]
    samples, _ = make(
        write(tmp_path / "a.jsonl", records), Codec.of(tokenizer), chat_template="<s>" + styles.CHATML
    )
    assert [runs for _, runs in samples] == [
        [(True, f"<s>ab{END}")],
        [(False, "<s>a"), (True, f"b{END}")],
        [(False, "<s><|im_start|>assistant\n"), (True, "c<|im_end|>"), (False, "\n")],
    ]


@pytest.mark.parametrize("long", [False, True])
def test_a_token_over_the_seam_is_taken_apart(tmp_path: Path, codec: Codec, long: bool) -> None:
    """`o` and `w` are one token where nothing is between them (C47)."""
    front, back = ("how " * (WINDOW_CHARS // 3), " now" * (WINDOW_CHARS // 3)) if long else ("how ", " now")
    records = [{"prompt": f"{front}o", "completion": f"w{back}"}, {"prompt": "ow", "completion": "ow"}]
    path = write(tmp_path / "a.jsonl", records)
    samples, _ = make(path, codec)
    assert samples[0] == (1, [(False, f"{front}o"), (True, f"w{back}{END}")])
    assert samples[1] == (2, [(False, "ow"), (True, f"ow{END}")])
    if not long:
        maker = SampleMaker(Recipe("somewhere"), codec, vocab_size=300)
        first, second = maker.make(cut_jobs(fingerprint_files([path])[0])[0])
        ow = codec.backend.token_to_id("ow")
        assert (first.ids & ~UNTRAINED).tolist().count(ow) == 2  # how, now
        assert (first.ids.size, second.ids.size) == (4 + 4 + 1, 3)  # h ow _ o, w _ n ow, end; ow, ow, end


def test_offsets_that_a_tokenizer_trims_do_not_move_the_seam(tmp_path: Path, directory: Path) -> None:
    """GPT-2's post-processor takes the space out of the characters of ` b`."""
    tokenizer = load_tokenizer(styles.byte_tokenizer(tmp_path / "tokenizer", merges=(("Ġ", "b"),)))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    records = [{"prompt": "a ", "completion": "b"}, {"prompt": "a", "completion": " b"}]
    samples, _ = make(write(tmp_path / "a.jsonl", records), Codec.of(tokenizer))
    assert [runs for _, runs in samples] == [
        [(False, "a "), (True, f"b{END}")],
        [(False, "a"), (True, f" b{END}")],
    ]


def test_added_tokens_that_take_in_white_space_are_where_they_stand(tmp_path: Path, codec: Codec) -> None:
    """As Phi's: the line feed behind `<|end|>` is a part of it."""
    backend = Tokenizer.from_str(codec.backend.to_str())
    backend.add_special_tokens(
        [AddedToken("<|stop|>", rstrip=True), AddedToken("<|assistant|>", rstrip=True)]
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    path = write(
        tmp_path / "a.jsonl", [{"messages": [*messages[:3], {"role": "assistant", "content": " c"}]}]
    )
    template = styles.PHI.replace("<|end|>", "<|stop|>")
    ((_, runs),), _ = make(path, replace(codec, backend=backend), chat_template=template)
    assert runs == [
        (False, "<|user|>\na<|stop|><|assistant|>"),
        (True, "b<|stop|>"),
        (False, "<|user|>\na<|stop|><|assistant|>"),
        (True, "c<|stop|>"),
        (False, END),
    ]


def test_a_seam_that_the_tokenizer_cannot_keep_is_refused(tmp_path: Path, codec: Codec) -> None:
    """Composed, e and its accent are one character. Apart they decode to the text; small letters do not."""
    backend = Tokenizer.from_str(codec.backend.to_str())
    backend.normalizer = normalizers.NFC()
    accent = write(tmp_path / "b.jsonl", [{"prompt": "ae", "completion": "\u0301b"}])
    assert make(accent, replace(codec, backend=backend))[0] == [(1, [(False, "ae"), (True, f"\u0301b{END}")])]
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    records = [{"prompt": "E", "completion": "\u0301"}, {"prompt": "e", "completion": "x"}]
    path = write(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError, match=r"a\.jsonl:1: prompt and answer, .* do not decode to their texts"):
        make(path, replace(codec, backend=backend))
    samples, counts = make(path, replace(codec, backend=backend), bad_lines="skip")
    assert [line for line, _ in samples] == [2]
    assert (counts.records, counts.bad_records) == (2, 1)


def test_nothing_to_train_on_is_kept_out_and_told(tmp_path: Path, codec: Codec) -> None:
    """C35: a template that marks nothing, and an only token that is nobody's label."""
    template = (
        "{% for message in messages %}{% if message.content == 'b' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{% generation %}{% endgeneration %}{{ message.content }}{% endif %}{% endfor %}<|im_end|>"
    )
    one = {"messages": [{"role": "assistant", "content": "b"}]}
    none = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    }
    samples, counts = make(write(tmp_path / "a.jsonl", [one]), codec, chat_template=template)
    assert (samples, counts.untrained, counts.samples) == ([], 1, 0)
    path = write(tmp_path / "b.jsonl", [{"text": "x"}, *[none] * 30])
    samples, counts = make(path, codec, chat_template=styles.CHATML)
    assert (len(samples), counts.untrained, counts.records) == (1, 30, 31)
    assert counts.problems[:2] == [f"{path}:{i}: nothing in it is trained on" for i in (2, 3)]
    assert len(counts.problems) == PROBLEMS_MAX


def test_bad_records_are_refused_or_skipped_and_counted(tmp_path: Path, codec: Codec) -> None:
    records = ['{"text": "a"', {"text": "b"}, {"question": "c"}, [1], {"prompt": "d", "completion": 1}]
    records += [{"messages": [{"role": "assistant", "content": "e"}]}, '{"text": "\\ud800"}', {"text": "f"}]
    path = write(tmp_path / "a.jsonl", records)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:1:13: this is no JSON: Expecting .*; correct the record, or .*bad_lines: skip",
    ):
        make(path, codec)
    samples, counts = make(path, codec, bad_lines="skip")
    assert samples == [(2, [(True, f"b{END}")]), (8, [(True, f"f{END}")])]
    assert (counts.records, counts.samples, counts.bad_records) == (8, 2, 6)
    assert [text.removeprefix(f"{path}:")[:22] for text in counts.problems] == [
        "1:13: this is no JSON:",
        "3: no format fits the ",
        "4:1: an array where an",
        "5: 'completion' is of ",
        "6: a conversation need",
        "7: the lone surrogate ",
    ]
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: the tokenizer|a\.jsonl:1: a conversation needs a chat template"
    ):
        make(write(tmp_path / "a.jsonl", records[5:6]), codec)


def test_an_id_without_a_row_is_named_with_its_line(tmp_path: Path, codec: Codec) -> None:
    """C49: three more tokens, one of them in sample 50."""
    backend = Tokenizer.from_str(codec.backend.to_str())
    rows = backend.get_vocab_size()
    backend.add_tokens(["[NEW1]", "[NEW2]", "[NEW3]"])
    more = replace(codec, backend=backend)
    records = [{"text": f"row {i}" + " [NEW2]" * (i == 50)} for i in range(1, 60)]
    with pytest.raises(
        DataError, match=rf"'\[NEW2\]' has the id {rows + 1} \(.*a\.jsonl:50\), but .*only {rows} rows"
    ):
        make(write(tmp_path / "a.jsonl", records), more, vocab_size=rows)
    (tmp_path / "a.txt").write_text("x\n" * 5_000 + "[NEW1]")
    with pytest.raises(DataError, match=r"a\.txt:5001\)"):
        make(tmp_path / "a.txt", more, vocab_size=rows)
    with pytest.raises(DataError, match="the start or end of every document"):
        SampleMaker(Recipe("somewhere"), codec, vocab_size=codec.end_of_text_id)


def test_nulls_that_arrow_fills_in_change_no_id(tmp_path: Path, codec: Codec) -> None:
    """C39: jsonl and parquet give the same ids, without the word None; a null argument stays."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": None}}}
    calling = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    records = [
        {"messages": calling},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    (row, _) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["messages"][0]["tool_calls"] is None
    recipe = {"chat_template": styles.QWEN3}
    lines, counts = make(write(tmp_path / "a.jsonl", records), codec, **recipe)
    assert (lines, counts) == make(tmp_path / "a.parquet", codec, **recipe)
    assert counts.samples == 3
    text = "".join(text for _, runs in lines for _, text in runs)
    assert '"arguments": {"x": null}' in text
    assert "None" not in text


def test_a_column_of_another_type_is_named_with_its_file(tmp_path: Path, codec: Codec) -> None:
    """C45: one part has numbers where the others have texts."""
    for number, values in enumerate((["a", "b"], [1, 2])):
        pq.write_table(pa.table({"text": values}), tmp_path / f"part-{number}.parquet")
    assert make(tmp_path / "part-0.parquet", codec)[1].samples == 2
    with pytest.raises(DataError, match=r"part-1\.parquet:1: 'text' is of type int where a text is expected"):
        make(tmp_path / "part-1.parquet", codec)


def test_a_long_record_comes_in_pieces_as_a_file_does(tmp_path: Path, codec: Codec) -> None:
    text = "now and " * 80_000
    (samples, counts) = make(write(tmp_path / "a.jsonl", [{"text": "x"}, {"text": text}]), codec)
    assert samples == [(1, [(True, f"x{END}")]), (2, [(True, text + END)])]
    (tmp_path / "a.txt").write_text(text)
    as_file, of_file = make(tmp_path / "a.txt", codec)
    assert as_file == [(1, [(True, text + END)])]
    assert (counts.records, of_file) == (2, Counts(records=1, samples=1, by_format={"text": 1}))


def test_a_saved_codec_is_the_same(tmp_path: Path, directory: Path, codec: Codec) -> None:
    codec.save(tmp_path / "codec.json")
    loaded = Codec.load(tmp_path / "codec.json")
    assert loaded.backend.to_str() == codec.backend.to_str()
    assert replace(loaded, backend=codec.backend) == codec
    assert codec.special_texts()[0] == "<|start_header_id|>"
    assert codec.special_tokens == {"eos_token": END, "bos_token": "<s>"}


def test_the_fingerprint_follows_the_recipe_and_the_tokenizer(tmp_path: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    (tmp_path / "t.jinja").write_text(styles.CHATML)
    data = DataConfig(files=["a"], chat_template=str(tmp_path / "t.jinja"))
    recipe = Recipe.of(data, directory, tokenizer)
    assert recipe == Recipe(str(directory), chat_template=styles.CHATML)
    assert Recipe(**json.loads(json.dumps(asdict(recipe)))) == recipe
    first = recipe.fingerprint(tokenizer)
    assert replace(recipe, tokenizer="elsewhere").fingerprint(tokenizer) == first
    changes: list[dict[str, Any]] = [
        {"format": "text"},
        {"text_field": "body"},
        {"train_on": "everything"},
        {"rewritten_turns": "last"},
        {"chat_template": None},
        {"bad_lines": "skip"},
    ]
    others = {replace(recipe, **change).fingerprint(tokenizer) for change in changes}
    other = load_tokenizer(styles.byte_tokenizer(tmp_path / "other"))
    assert len(others | {first, recipe.fingerprint(other)}) == 8
    own = load_tokenizer(styles.byte_tokenizer(tmp_path / "own", template=styles.GEMMA))
    assert Recipe.of(DataConfig(files=["a"]), directory, own).chat_template == styles.GEMMA
    with pytest.raises(DataError, match=r"none\.jinja cannot be read"):
        Recipe.of(DataConfig(files=["a"], chat_template=str(tmp_path / "none.jinja")), directory, tokenizer)


def test_counts_add_up() -> None:
    total = Counts(records=1, by_format={"text": 1}, problems=["a"])
    total.add(Counts(records=2, samples=1, empty=1, by_format={"text": 1, "prompt": 1}, problems=["b"] * 30))
    assert total.by_format == {"text": 2, "prompt": 1}
    assert (total.records, total.samples, total.empty) == (3, 1, 1)
    assert total.problems == ["a", *["b"] * (PROBLEMS_MAX - 1)]
