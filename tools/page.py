"""A page for a browser that needs no other file: text, tables, pictures within. No script runs on it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        text_columns: the first ones, which are texts (left); the others are numbers (right).
        caption: below it.
    """

    columns: list[str]
    rows: list[list[str]]
    text_columns: int
    caption: str


@dataclass(frozen=True)
class Picture:
    title: str
    png: bytes

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    """As it is, line breaks too."""

    text: str


@dataclass(frozen=True)
class Page:
    """What stands on it, in this order.

    Attributes:
        facts: name of a part of the machine -> what it is.
    """

    title: str
    subtitle: str
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    blocks: Sequence[Grid | Picture | Heading | Text] = ()

    def html(self) -> bytes:
        import jinja2

        template = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        ).from_string(_TEMPLATE.read_text(encoding="utf-8"))
        blocks = [(type(block).__name__, block) for block in self.blocks]
        return template.render(page=self, blocks=blocks).encode(errors="surrogateescape")  # paths: any bytes
