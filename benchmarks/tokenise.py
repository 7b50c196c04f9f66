"""How fast a JSONL file becomes tokens, in how much memory, and whether a killed run loses or doubles a row.

    python benchmarks/tokenise.py [--lines 1000000] [--workers 2] [--kind messages] [--interrupt 3]

Makes the file (words drawn with Zipf's law from a made-up lexicon) and a tokenizer, then opens it as a run
does, in a process of its own. `--interrupt`: that process is killed with SIGKILL so many times, each time
after two more shards.
Memory is the sum of PSS (what a process has for itself, and its share of what it shares) over that process
and its workers, ten times a second. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.prepare import open_data
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.io.sizes import format_bytes

VOCABULARY = 8192
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|endoftext|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_file(path: Path, lines: int, kind: str) -> None:
    """Lines of 5 to 80 words; text, or a question and an answer."""
    draw = random.Random(0)
    lexicon = ["".join(draw.choices("etaoinshrdlucmfwyp", k=draw.randint(2, 9))) for _ in range(20_000)]
    ranks = np.minimum(np.random.default_rng(0).zipf(1.2, 1 << 20), len(lexicon)) - 1
    words = [lexicon[rank] for rank in ranks.tolist()]
    with path.open("w") as file:
        for number in range(lines):
            at, count = draw.randrange(len(words) - 200), draw.randint(5, 80)
            parts = [" ".join(words[at : at + count // 4]), " ".join(words[at + count // 4 : at + count])]
            value: dict[str, Any] = {"text": f"{number} {parts[0]} {parts[1]}"}
            if kind == "messages":
                roles = zip(("user", "assistant"), (f"{number} {parts[0]}", parts[1]), strict=True)
                value = {"messages": [{"role": role, "content": content} for role, content in roles]}
            file.write(json.dumps(value) + "\n")


def open_file(folder: Path, workers: int) -> None:
    """What is measured, in its own process: prints the facts as JSON."""
    data = DataConfig(
        files=[str(folder / "rows.jsonl")],
        tokenizer=str(folder / "tokenizer"),
        chat_template=str(folder / "template.jinja"),
        workers=workers,
        cache_dir=str(folder / "cache"),
    )
    model = ModelConfig(config="none")
    (store,) = open_data(
        data, model, folder / "run", vocab_size=VOCABULARY, on_progress=lambda progress: None
    )
    lines = [int(store.where(number).rpartition(":")[2]) for number in range(store.documents)]
    facts = {"rows": store.documents, "tokens": store.tokens, "masked": store.masked}
    print(json.dumps(facts | {"each_once": lines == list(range(1, len(lines) + 1)), "origin": store.origin}))


def pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def shards(folder: Path) -> int:
    """Finished ones."""
    return sum(path.name.isdigit() for path in folder.glob("cache/tokens/*/*"))


def watch(command: list[str], ended: Callable[[], bool]) -> tuple[str, int]:
    """What the command says, and the most memory that it and its children had; it is killed if `ended`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    most = 0
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        if ended():
            process.kill()
            break
        pids = [process.pid, *(child.pid for child in tree.children(recursive=True))]
        most = max(most, sum(map(pss_bytes, pids)))
        time.sleep(0.1)
    said = process.stdout.read()
    process.wait()
    return said, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kind", choices=["text", "messages"], default="messages")
    parser.add_argument("--interrupt", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return open_file(options.folder, options.workers)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        file = folder / "rows.jsonl"
        make_file(file, options.lines, options.kind)
        (folder / "template.jinja").write_text(TEMPLATE)
        make_file(folder / "sample.txt", min(options.lines, 20_000), "text")
        train_tokenizer(fingerprint_files([folder / "sample.txt"]), VOCABULARY, folder / "tokenizer")
        begin, most = time.perf_counter(), 0
        command = [sys.executable, __file__, "--child", "--folder", name, "--workers", str(options.workers)]
        for _ in range(options.interrupt):
            before = shards(folder)
            most = max(most, watch(command, lambda before=before: shards(folder) >= before + 2)[1])
        said, last = watch(command, lambda: False)
        seconds, facts, nbytes = time.perf_counter() - begin, json.loads(said), file.stat().st_size
        most = max(most, last)
        print(f"{options.lines} lines of {options.kind}, {format_bytes(nbytes)}, workers {options.workers}")
        print(
            f"{seconds:.1f} s: {facts['rows'] / seconds:.0f} rows/s, {nbytes / seconds / 1e6:.1f} MB/s, ",
            end="",
        )
        print(f"{facts['tokens'] / seconds / 1e6:.2f} M tokens/s; at most {format_bytes(most)} (PSS)")
        print(facts["origin"])
        print(json.dumps(vars(options) | facts | {"folder": None, "seconds": seconds, "pss_bytes": most}))


if __name__ == "__main__":
    main()
