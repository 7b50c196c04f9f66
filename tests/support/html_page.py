"""Pages of reports, taken apart."""

from __future__ import annotations

import base64
from html.parser import HTMLParser


class Page(HTMLParser):
    """Cells of the table by row, pictures, the text, and that tags are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.images: list[bytes] = []
        self.text, self.links, self.open = "", list[str](), list[str]()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            kind, _, data = (values["src"] or "").partition(",")
            assert kind == "data:image/png;base64"
            self.images.append(base64.b64decode(data, validate=True))
        self.links += [value or "" for name, value in attrs if name == "href"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
