"""Pages for users as tests read them: fenced blocks, and the project that their commands find."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from support.project import make_data, save_model, shrink
from support.runs import made_up_profile

from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import parse
from tierstream.engine.config_tree import REQUIRED, Given, build, leaves
from tierstream.tools import cli, data_preview, train

ROOT = Path(__file__).resolve().parents[2]
#: What is kept for those who change the code has no blocks for users.
_OTHERS = {"design.md", "log.md"}
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Commands of `sh` blocks that are only parsed: they measure the machine, or build.
_NOT_RUN = ("make", "pip", "tierstream bench", "tierstream doctor")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is (```yaml run.yaml), and its text."""

    page: str
    line: int
    language: str
    file: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README and the pages of docs, as paths from the root."""
    docs = (ROOT / "docs").glob("*.md"), (ROOT / "docs" / "how-to").glob("*.md")
    names = sorted(path for folder in docs for path in folder if path.name not in _OTHERS)
    return ["README.md", *(str(path.relative_to(ROOT)) for path in names)]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = _BLOCK.finditer(text)
    return [Block(page, text.count("\n", 0, match.start()) + 1, *match.groups()) for match in found]


def load_yaml(text: str, name: str) -> RunConfig:
    """A run file or a part of one: what is required and not said is made up."""
    given = parse(RunConfig, text, name)
    missing: dict[str, Any] = {"run_dir": "r", "data.files": ["f"]}
    if not given.keys() & {"model.path", "model.config"}:
        missing["model.path"] = "m"
    required = [key for key, leaf in leaves(RunConfig).items() if leaf.default is REQUIRED]
    assert set(required) <= set(missing) | {"model.path"}
    return build(RunConfig, {key: Given(value, key) for key, value in missing.items()} | given, name)


def make_project(folder: Path) -> None:
    """What the pages take for granted: models, data, drives."""
    save_model(folder / "models" / "Qwen3-0.6B")
    save_model(folder / "models" / "Qwen3-30B-A3B", experts=True)
    make_data(folder)
    for name in ("drive", "drive-2"):
        (folder / name).mkdir()
    made_up_profile(folder)


class Reader:
    """Does what a page says, in a project, with every run made small."""

    def __init__(self, project: Path) -> None:
        self._profile = project / "machine.json"

    def read(self, page: str) -> None:
        from_file, run_train, preview = RunConfig.from_file, train.run_train, data_preview.preview
        small = self._shrink
        with (
            mock.patch.object(RunConfig, "from_file", lambda *args: small(from_file(*args))),
            mock.patch.object(train, "run_train", lambda config: run_train(small(config))),
            mock.patch.object(data_preview, "preview", lambda config, screen: preview(small(config), screen)),
        ):
            for block in blocks(page):
                self._do(block)

    def _shrink(self, config: RunConfig) -> RunConfig:
        return shrink(config, self._profile)

    def _do(self, block: Block) -> None:
        if block.file is not None:
            Path(block.file).write_text(block.text)
        if block.language == "python" and block.file is None:
            exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
        if block.language == "sh":
            for command in commands(block.text):
                if not command.startswith(_NOT_RUN):
                    run(command, block.where)


def commands(text: str) -> Iterator[str]:
    """The commands of a shell block, a line each."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield shlex.join(words)


def run(command: str, where: str) -> None:
    """A command of a page; tierstream's own in this process, which spares the imports."""
    name, *args = shlex.split(command)
    if name == "tierstream":
        status = cli.main(args)
    else:
        status = subprocess.run([sys.executable if name == "python" else name, *args]).returncode
    assert status == 0, f"{where}: {command} ended with status {status}"
