"""The pages for users: what they show loads and runs, and what they name is there."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, Reader, blocks, commands, load_yaml, make_project, pages

from tierstream.engine.config import RunConfig
from tierstream.engine.config_tree import leaves, option
from tierstream.tools import cli

PAGES = pages()
LANGUAGES = {"sh", "yaml", "python", "text", "json"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    make_project(folder)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_does_can_be_done(
    page: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    shutil.copytree(template, project)
    monkeypatch.chdir(project)
    monkeypatch.setenv("COLUMNS", "80")
    Reader(template).read(page)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, block.where
        if block.language == "yaml":
            load_yaml(block.text, block.where)
        if block.language == "sh":
            for command in commands(block.text):
                if command.startswith("tierstream "):
                    assert command.split()[1] in cli.COMMANDS, f"{block.where}: {command}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], link


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_options_that_a_page_names_exist(page: str) -> None:
    """`section.key` and `--section.key`, in text and code."""
    text = (ROOT / page).read_text()
    known = leaves(RunConfig)
    sections = {key.partition(".")[0] for key in known if "." in key}
    for section, key in re.findall(r"`(\w+)\.(\w+)(?::[^`]*)?`", text):
        if section in sections and key not in ("yaml", "json", "jsonl", "py"):
            assert f"{section}.{key}" in known, f"{page}: {section}.{key}"
    options = {option(key) for key in known}
    for name in re.findall(r"--(?!section)\w+\.[\w-]+", text):
        assert name in options, f"{page}: {name}"


def messages() -> list[str]:
    """All texts of the program, with `{}` where they have values."""
    found = []
    for folder in ("io", "tiered", "engine", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_messages_that_are_explained_are_those_of_the_program() -> None:
    heads = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    texts = [" ".join(text.split()) for text in messages()]
    assert len(heads) > 20
    for head in heads:
        assert any(says(text, head) for text in texts), f"no message of the program is: {head}"


def says(text: str, head: str) -> bool:
    """Whether a text has all that is between the `...` of a heading, in its order."""
    at = 0
    for part in head.split("..."):
        at = text.find(part.strip(), at)
        if at < 0:
            return False
    return True


def test_the_reference_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / "benchmarks" / "reference.py")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 0
