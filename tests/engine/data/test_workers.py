"""Processes that tokenise: the same bytes and errors as without, whoever starts them (C85), whatever ends
them.
"""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tierstream.engine.data.codec import Codec
from tierstream.engine.data.files import SourceFile, fingerprint_files
from tierstream.engine.data.pool import write_shards
from tierstream.engine.data.samples import Recipe
from tierstream.engine.data.shard_writer import plan_shards
from tierstream.engine.data.shards import TokenStore
from tierstream.engine.data.tokenise import Tokeniser
from tierstream.engine.data.tokenizer import load_tokenizer, train_tokenizer
from tierstream.engine.data.worker import Assignment
from tierstream.io.errors import DataError, StorageError

SHARD_BYTES = 4000
FILES, LINES = 120, 900


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text/000.txt ..., text/rows.jsonl and tokenizer/; about 90 shards."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for number in range(FILES):
        text = f"document {number} says é🙂 " * (number % 17 + 60)
        (root / "text" / f"{number:03}.txt").write_text(text)
    lines = (json.dumps({"text": f"line {number} " * (number % 5 + 8)}) for number in range(LINES))
    (root / "text" / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    train_tokenizer(sources(root / "text"), 270, root / "tokenizer")
    return root


def sources(folder: Path) -> list[SourceFile]:
    return fingerprint_files(sorted(folder.iterdir()))


def tokeniser(corpus: Path, cache: Path, workers: int, **keys: Any) -> Tokeniser:
    keys = {"on_progress": lambda progress: None, "vocab_size": 270} | keys
    return Tokeniser(
        recipe=Recipe("somewhere"), tokenizer=load_tokenizer(corpus / "tokenizer"), cache=cache,
        workers=workers, shard_bytes=SHARD_BYTES, **keys,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tokeniser(corpus, tmp_path_factory.mktemp("expected"), 0).open(sources(corpus / "text"), "text")


def assert_same(store: TokenStore, expected: TokenStore) -> None:
    assert store.documents == expected.documents == FILES + LINES
    assert store.fingerprint == expected.fingerprint
    for number, length in enumerate(expected.lengths.tolist()):
        assert np.array_equal(store.read(number, 0, length), expected.read(number, 0, length))
    for name in ("lengths", "first_trained"):
        assert np.array_equal(getattr(store, name), getattr(expected, name))
    assert store.counts == expected.counts
    places = [store.where(number) for number in range(store.documents)]
    assert [place.rpartition("/")[2] for place in places] == [
        *(f"{number:03}.txt:1" for number in range(FILES)),
        *(f"rows.jsonl:{number + 1}" for number in range(LINES)),
    ]


def test_every_file_is_the_same_without_and_with_processes(corpus: Path, tmp_path: Path) -> None:
    files = sources(corpus / "text")
    for workers in (0, 3):
        tokeniser(corpus, tmp_path / str(workers), workers).open(files, "text")
    (alone,) = (tmp_path / "0" / "tokens").iterdir()
    (shared,) = (tmp_path / "3" / "tokens").iterdir()
    names = [str(path.relative_to(alone)) for path in alone.rglob("*.*") if path.suffix != ".lock"]
    assert len(names) > 3 * 50
    assert filecmp.cmpfiles(alone, shared, names, shallow=False) == (names, [], [])
    assert not list(shared.glob("*.tmp"))


def bad_text(folder: Path) -> None:
    for number in (7, 90, 30):
        (folder / f"{number:03}.txt").write_bytes(b"ok \xff")


def unknown_token(folder: Path) -> None:
    for number in (90, 8):
        (folder / f"{number:03}.txt").write_text("the cat\nsat on\n\nthe <two> mat\n")


@pytest.mark.parametrize("spoil", [bad_text, unknown_token])
def test_the_first_error_reaches_the_user_as_without_processes(
    corpus: Path, tmp_path: Path, spoil: Any
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for file in sources(corpus / "text"):
        (text / file.path.name).symlink_to(file.path)
    for number in (7, 8, 30, 90):
        (text / f"{number:03}.txt").unlink()
        (text / f"{number:03}.txt").write_text("good")
    spoil(text)
    said = []
    for workers in (0, 3):
        opener = tokeniser(corpus, tmp_path / str(workers), workers)
        opener.tokenizer.add_tokens(["<one>", "<two>"])
        with pytest.raises(DataError) as caught:
            opener.open(sources(text), "text")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert f"{text}/00{'7' if spoil is bad_text else '8'}.txt" in said[0]
    assert psutil.Process().children() == []


def test_an_error_of_storage_stays_one(corpus: Path, tmp_path: Path) -> None:
    plans, store = plan_shards(sources(corpus / "text"), SHARD_BYTES), tmp_path / "store"
    codec = tmp_path / "codec.json"
    Codec.of(load_tokenizer(corpus / "tokenizer")).save(codec)
    store.write_text("no directory")
    with pytest.raises(StorageError, match=r"looking at .*/00000\.tmp.* failed: Not a directory") as caught:
        run_pool(plans, store, str(codec))
    assert caught.value.errno == 20
    assert caught.value.path.startswith(str(store))


def run_pool(plans: Any, store: Path, codec: str) -> None:
    write_shards(
        plans, store, Assignment(Recipe("somewhere"), codec, 270), workers=2, pass_fds=[],
        on_done=lambda plan, tokens: None, on_tokens=lambda plan, tokens: None,
    )  # fmt: skip


def test_a_process_that_dies_says_its_last_words(corpus: Path, tmp_path: Path) -> None:
    plans = plan_shards(sources(corpus / "text"), SHARD_BYTES)
    with pytest.raises(DataError) as caught:
        run_pool(plans, tmp_path, "/nowhere/codec.json")
    for words in ("a process that tokenises at ", "exit status 1", "No such file", "/nowhere/codec.json"):
        assert words in str(caught.value)
    assert psutil.Process().children() == []


def test_a_process_that_is_killed_is_named_with_its_signal_and_a_remedy(corpus: Path, tmp_path: Path) -> None:
    def kill_one(progress: Any) -> None:
        psutil.Process().children()[0].kill()

    said = r"was ended by signal 9 \(SIGKILL\), as .* when memory runs out; fewer processes \(data\.workers\)"
    with pytest.raises(DataError, match=said):
        tokeniser(corpus, tmp_path, 2, on_progress=kill_one).open(sources(corpus / "text"), "text")
    assert psutil.Process().children() == []


def test_workers_need_neither_torch_nor_transformers() -> None:
    code = "import sys, tierstream.engine.data.worker; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


# A script without a `__main__` guard, killed or not

SCRIPT = """
import sys
from pathlib import Path
from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.samples import Recipe
from tierstream.engine.data.tokenise import Tokeniser
from tierstream.engine.data.tokenizer import load_tokenizer

print("begins", flush=True)
corpus, cache = map(Path, sys.argv[1:])
tokeniser = Tokeniser(
    recipe=Recipe("somewhere"), tokenizer=load_tokenizer(corpus / "tokenizer"), cache=cache, vocab_size=270,
    workers=2, on_progress=print, shard_bytes=4000,
)
print(tokeniser.open(fingerprint_files(sorted((corpus / "text").iterdir())), "text").origin)
"""


def start(corpus: Path, cache: Path) -> subprocess.Popen[str]:
    """The script as standard input of an interpreter: like a notebook, its main module is no file."""
    process = subprocess.Popen(
        [sys.executable, "-", str(corpus), str(cache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(SCRIPT)
    process.stdin.close()
    return process


def wait_for(condition: Any, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def finished(cache: Path) -> int:
    return len([path for path in cache.glob("tokens/*/0*") if path.name.isdigit()])


def test_killed_and_run_again_the_store_is_that_of_an_unbroken_run(
    corpus: Path, tmp_path: Path, expected: TokenStore
) -> None:
    process = start(corpus, tmp_path)
    wait_for(lambda: finished(tmp_path) >= 5)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    assert process.wait(timeout=30) != 0
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    kept = finished(tmp_path)
    assert 5 <= kept < len(plan_shards(sources(corpus / "text"), SHARD_BYTES))
    assert process.stdout is not None
    process.stdout.close()
    store = tokeniser(corpus, tmp_path, 2).open(sources(corpus / "text"), "text")
    assert f"{kept} of " in store.origin
    assert_same(store, expected)


def test_a_script_without_a_guard_runs_once(corpus: Path, tmp_path: Path, expected: TokenStore) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONWARNINGS": "error::ResourceWarning"}
    said = subprocess.check_output(
        [sys.executable, str(script), str(corpus), str(tmp_path)], text=True, env=environment
    )
    assert said.count("begins") == 1
    assert f"{expected.tokens} tokens of {FILES + LINES} documents made" in said
    assert_same(tokeniser(corpus, tmp_path, 0).open(sources(corpus / "text"), "text"), expected)


@pytest.mark.gpu
def test_with_cuda_live_the_ids_are_the_same(corpus: Path, tmp_path: Path, expected: TokenStore) -> None:
    torch.cuda.init()
    assert torch.zeros(1, device="cuda").item() == 0
    assert_same(tokeniser(corpus, tmp_path, 4).open(sources(corpus / "text"), "text"), expected)
