"""What a conversion has found, and the run file that says it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import dump_value
from tierstream.engine.config_tree import leaves
from tierstream.tools.convert_config.source import Source

_COLUMNS = 80
#: Reason -> patterns of keys that have no counterpart for it.
Reasons = dict[str, tuple[str, ...]]
_FILL_IN = {
    "run_dir": "a directory for the results of this run",
    "model.path": "a local model directory",
    "data.files": "files or patterns of your texts, prompts or conversations",
}


@dataclass(slots=True)
class Conversion:
    """Our settings with a word on where each comes from.

    Attributes:
        open: key -> what is to be filled in.
        remarks: what a reader has to know, in sentences.
        left_out: reason -> keys of the source.
        unknown: keys of the source that the converter has never heard of.
    """

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, source: str) -> None:
        """The first value of a key stands; another one later is a remark."""
        if key not in self.settings:
            self.settings[key] = value, source
        elif (kept := self.settings[key])[0] != value:
            self.remarks.append(
                f"{key}: {source} says {dump_value(value)}, {kept[1]} says {dump_value(kept[0])}; the latter "
                "is taken."
            )

    def check_chunks(self) -> None:
        """Leave out a chunk that is larger than its step: the two can come from different sources."""
        default = leaves(RunConfig)["train.rows_per_step"].default
        step, _ = self.settings.get("train.rows_per_step", (default, ""))
        chunk, _ = self.settings.get("train.rows_per_chunk", (0, ""))
        if chunk > step:
            del self.settings["train.rows_per_chunk"]
            self.open["train.rows_per_chunk"] = f"{chunk} rows are more than a step of {step} has"

    def leave(self, reason: str, *keys: str) -> None:
        self.left_out.setdefault(reason, []).extend(keys)

    def leave_rest(self, source: Source, reasons: Reasons) -> None:
        """Sort what nobody took by the reason for it."""
        for key in source.rest():
            for reason, patterns in reasons.items():
                if any(fnmatchcase(key, pattern) for pattern in patterns):
                    self.leave(reason, key)
                    break
            else:
                self.unknown.append(key)

    def render(self, sources: Sequence[str]) -> str:
        """The run file. It loads when the keys that are to be filled in are."""
        open_keys = {key: text for key, text in (_FILL_IN | self.open).items() if key not in self.settings}
        lines = [f"# Converted from {' and '.join(sources)}."]
        lines += _comment(f"To fill in: {', '.join(open_keys)}.") if open_keys else []
        for remark in self.remarks:
            lines += _comment(remark, bullet=True)
        order = [key for key in leaves(RunConfig) if key in self.settings or key in open_keys]
        for section, keys in groupby(order, key=lambda key: key.rpartition(".")[0]):
            if section:
                lines.append(f"{section}:")
            for key in keys:
                lines += self._setting(key, open_keys, "  " if section else "")
        if self.left_out:
            lines += ["", "# Without a counterpart:"]
            for reason, names in self.left_out.items():
                lines += _comment(f"{', '.join(names)}: {reason}.", bullet=True)
        if self.unknown:
            lines += ["", *_comment(f"Not known to the converter, and left out: {', '.join(self.unknown)}.")]
        return "\n".join(lines) + "\n"

    def _setting(self, key: str, open_keys: dict[str, str], indent: str) -> Iterator[str]:
        name = key.rpartition(".")[2]
        if key in open_keys:
            yield from _comment(f"{name}: (to fill in) {open_keys[key]}", indent)
            return
        value, source = self.settings[key]
        text = f"{indent}{name}: {dump_value(value)}"
        if len(text) + len(source) + 4 <= _COLUMNS:
            yield f"{text}  # {source}"
        else:
            yield from _comment(source, indent)
            yield text


def _comment(text: str, indent: str = "", *, bullet: bool = False) -> list[str]:
    first, later = (f"{indent}# - ", f"{indent}#   ") if bullet else (f"{indent}# ", f"{indent}# ")
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
