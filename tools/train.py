"""`tierstream train RUN.yaml [--section.key value ...]`"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from tierstream.engine.config import RunConfig
from tierstream.engine.nvme_dirs import check_nvme_dirs
from tierstream.io.profile import MachineProfile
from tierstream.tools.live import ConsoleCallback
from tierstream.tools.options import parse_run
from tierstream.tools.signals import StopOnSignal

_DESCRIPTION = """\
Train a model as RUN.yaml says.
- An option --section.key changes that key of the file; its value is written as
  in the file: null, true, 1e-4, 8GiB.
- A SIZE is a number of bytes, or a number with KiB, MiB, GiB, TiB (powers of
  1024) or kB, MB, GB, TB (powers of 1000).
- Relative paths are relative to the current directory, also those in the file.
- `--resume auto` is short for `--checkpoint.resume auto`: go on with this run.
- `tierstream train RUN.yaml --help` shows the values of the file as defaults.
"""


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = [re.sub(r"^--resume(?==|$)", "--checkpoint.resume", option) for option in args]
    return run_train(parse_run(RunConfig, options, command="tierstream train", description=_DESCRIPTION))


def _look_at_drives(config: RunConfig) -> None:
    """What can be told of a mistyped path in the first second, before torch is imported. The run looks again,
    at the space too.
    """
    if config.tiers.profile is not None:
        MachineProfile.load(config.tiers.profile)
    check_nvme_dirs(config.tiers.nvme_dirs or [])


def run_train(config: RunConfig) -> int:
    """Train, with the run shown on standard output, until it is done or a signal ends it. Returns the exit
    status; raises TierstreamError.
    """
    # Read when OpenMP starts, with the import of torch. A thread that spins at a barrier holds the core that
    # an I/O or update thread, or another process, needs: beside one busy process, steps took 6 s instead of
    # 1.1 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with StopOnSignal() as signals:
        _look_at_drives(config)
        from tierstream.engine.trainer import Trainer  # takes seconds to import; a bad option is told before

        with ConsoleCallback() as observer:
            summary = Trainer(config, [observer, signals]).run()
    return 0 if summary.stopped is None else signals.exit_status
