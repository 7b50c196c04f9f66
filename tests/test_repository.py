"""The shape of the repository: who imports whom, sizes, and a README that lists what is there."""

import ast
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: From the bottom up: a folder may import itself and what stands before it.
LAYERS = ("_native", "io", "tiered", "engine", "tools")
TORCH_FREE = ("io", "tiered")

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
TEST_FUNCTION_LINES_MAX = 80


def tracked() -> list[str]:
    """The files that git tracks and that are there, as paths from the root."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listing.stdout.split("\0") if path and (ROOT / path).exists()]


TRACKED = tracked()
SOURCES = [path for path in TRACKED if path.endswith((".py", ".pyi", ".cpp", ".h"))]
PYTHON = [path for path in TRACKED if path.endswith(".py")]
MODULES = [path for path in PYTHON if path.split("/")[0] in LAYERS]


def imports(path: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that a module of the package imports, `from a import b` as a.b."""
    package = ("tierstream", *PurePosixPath(path).parent.parts)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def test_there_is_something_to_check() -> None:
    assert {path.split("/")[0] for path in MODULES} == set(LAYERS) - {"_native"}


@pytest.mark.parametrize("path", MODULES)
def test_imports_go_down_only(path: str) -> None:
    own = LAYERS.index(path.split("/")[0])
    wrong = [
        f"{path}:{line} imports {name}"
        for line, name in imports(path)
        if name.startswith("tierstream.")
        and name.split(".")[1] in LAYERS
        and LAYERS.index(name.split(".")[1]) > own
    ]
    assert not wrong


@pytest.mark.parametrize("path", [path for path in MODULES if path.split("/")[0] in TORCH_FREE])
def test_io_and_store_do_without_torch(path: str) -> None:
    heavy = ("torch", "transformers")
    assert [f"{path}:{line}" for line, name in imports(path) if name.split(".")[0] in heavy] == []


@pytest.mark.parametrize("path", SOURCES)
def test_files_are_short_and_without_tabs(path: str) -> None:
    lines = (ROOT / path).read_text().splitlines()
    assert len(lines) <= MODULE_LINES_MAX
    assert not [number for number, line in enumerate(lines, start=1) if "\t" in line]


@pytest.mark.parametrize("path", PYTHON)
def test_functions_are_short(path: str) -> None:
    limit = TEST_FUNCTION_LINES_MAX if path.startswith("tests/") else FUNCTION_LINES_MAX
    long = [
        f"{path}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > limit
    ]
    assert not long


class Entry(NamedTuple):
    """A line of the README's tree: paths from the root (folders end in a slash; `*` matches any), comment."""

    paths: tuple[str, ...]
    comment: str
    has_children: bool


def fenced_blocks(markdown: str) -> Iterator[list[str]]:
    for match in re.finditer(r"^```[^\n]*\n(.*?)^```$", markdown, re.DOTALL | re.MULTILINE):
        yield match.group(1).splitlines()


def read_tree(lines: list[str]) -> list[Entry]:
    """Names in depth by indentation or box-drawing characters, commas between several; then the comment."""
    rows: list[tuple[int, tuple[str, ...], str]] = []
    for line in lines:
        match = re.fullmatch(r"([\s│├└─]*)((?:[^\s,│]+, *)*[^\s,│]+)\s*#?\s*(.*)", line)
        if match is not None and match[2] not in (".", "./", "tierstream/"):
            rows.append((len(match[1]), tuple(re.split(r", *", match[2])), match[3]))
    entries = []
    above: list[tuple[int, str]] = []
    for number, (column, names, comment) in enumerate(rows):
        while above and above[-1][0] >= column:
            above.pop()
        parent = above[-1][1] if above else ""
        above.append((column, parent + names[0]))
        has_children = number + 1 < len(rows) and rows[number + 1][0] > column
        entries.append(Entry(tuple(parent + name for name in names), comment, has_children))
    return entries


@pytest.fixture(scope="module")
def tree() -> list[Entry]:
    readme = (ROOT / "README.md").read_text()
    trees = [block for block in fenced_blocks(readme) if any("pyproject.toml" in line for line in block)]
    assert len(trees) == 1, "README.md must have one fenced block that lists pyproject.toml and the rest"
    return read_tree(trees[0])


def listed(file: str, path: str) -> bool:
    """Is `file` the path of an entry, or inside the folder that it names?"""
    return file.startswith(path) if path.endswith("/") else fnmatchcase(file, path)


def test_every_path_of_the_readme_tree_exists(tree: list[Entry]) -> None:
    paths = [path for entry in tree for path in entry.paths]
    assert [path for path in paths if not any(listed(file, path) for file in TRACKED)] == []
    assert len(paths) == len(set(paths))


def test_every_line_of_the_readme_tree_says_what_it_is(tree: list[Entry]) -> None:
    assert [entry.paths for entry in tree if not entry.comment] == []


def test_readme_tree_lists_every_source_file(tree: list[Entry]) -> None:
    """By name, or by a folder of which no content is listed."""
    leaves = [path for entry in tree if not entry.has_children for path in entry.paths]
    assert [file for file in SOURCES if not any(listed(file, path) for path in leaves)] == []


def test_tree_reader() -> None:
    text = [
        "tierstream/",
        "├── io/                  moves bytes",
        "│   ├── posix.py         direct I/O",
        "│   └── simd_*.h, b.h    # two patterns",
        "├── tests/               mirrors the folders",
        "│",
        "└── Makefile",
    ]
    assert read_tree(text) == [
        Entry(("io/",), "moves bytes", True),
        Entry(("io/posix.py",), "direct I/O", False),
        Entry(("io/simd_*.h", "io/b.h"), "two patterns", False),
        Entry(("tests/",), "mirrors the folders", False),
        Entry(("Makefile",), "", False),
    ]
    plain = ["csrc/   native", "  a.h   one", "docs/   text"]
    assert [entry.paths for entry in read_tree(plain)] == [("csrc/",), ("csrc/a.h",), ("docs/",)]
