"""`tierstream verify RUN_OR_CHECKPOINT`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstream.io.sizes import format_bytes
from tierstream.tiered.snapshot import Snapshot
from tierstream.tools.checkpoints import find_checkpoint
from tierstream.tools.options import NoOptions, parse_options, take_positionals

_DESCRIPTION = "Compare every page of a checkpoint (of a run: its newest) with its checksum."


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    names, options = take_positionals(args, ["RUN_OR_CHECKPOINT"], "tierstream verify")
    parse_options(NoOptions, options, prog="tierstream verify RUN_OR_CHECKPOINT", description=_DESCRIPTION)
    path = find_checkpoint(Path(names[0]))
    snapshot = Snapshot.open(path)
    snapshot.verify()
    size = f"{len(snapshot.planes)} planes, {format_bytes(snapshot.layout.nbytes(durable=True))}"
    print(f"{path}: step {snapshot.state['step']}, {size}: every checksum is right")
    return 0
