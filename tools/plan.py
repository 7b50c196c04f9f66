"""`tierstream plan RUN.yaml [--section.key value ...] [--machine NAME] ...`"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstream.engine.config import RunConfig
from tierstream.engine.nvme_dirs import check_nvme_dirs
from tierstream.engine.planner.aside import companion
from tierstream.io.errors import ConfigError
from tierstream.tools.options import parse_run
from tierstream.tools.outputs import check_file, write_output
from tierstream.tools.quiet import without_warnings

if TYPE_CHECKING:
    from tierstream.engine.planner.machine import Machine
    from tierstream.engine.planner.outlook import Ahead

_DESCRIPTION = """\
Say what a run comes to before it is begun: whether it fits, what it takes of each
tier, how long its steps take and why, and what would make them shorter.
- Works from RUN.yaml and the model's config.json alone: no weights and no data are
  read, nothing is written (but to ~/.cache/tierstream, what tensors the model has).
- An option --section.key changes that key of the file.
- `--machine` plans for another machine: one that comes with tierstream
  (workstation, server, superchip, h200), or a profile that `tierstream bench
  --profile` wrote there. Without it: this one, as the run would find it.
- What cannot fit is refused with the bytes that are missing, and what would do.
"""


@dataclass(kw_only=True, slots=True)
class PlanOptions(RunConfig):
    """`tierstream plan RUN.yaml`."""

    machine: str | None = None
    """A machine by its name, or a profile of one; null: this one."""
    what_if: str = ""
    """Changes to the machine, as in dram=256GiB,drives=4: host memory, memory of the GPU (gpu), drives,
    cores. Budgets that the run sets grow with it."""
    choose: bool = False
    """Choose what the run leaves open of its placement, as the run itself does on a machine that its profile
    describes: the fastest plan that changes no bit. Takes about a minute for 100 billion parameters."""
    price: float | None = None
    """Of the machine, for an hour; null: costs are not told."""
    json: str | None = None
    """A file for everything that is known, as JSON; -: standard output, in place of the text."""
    picture: str | None = None
    """A PNG file for a picture of the tiers and of a step."""

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(f"--price is {self.price}; it must be a finite number >= 0")
        if self.picture is not None and not self.picture.endswith(".png"):
            raise ConfigError(f"--picture is {self.picture}; it must end in .png")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    options = parse_run(PlanOptions, args, command="tierstream plan", description=_DESCRIPTION)
    with without_warnings():
        return plan(options)


def plan(options: PlanOptions) -> int:
    """Plan and tell. Returns the exit status; raises TierstreamError."""
    for option, path in (("--json", options.json), ("--picture", options.picture)):
        if path is not None and path != "-":
            check_file(option, path)
    with ExitStack() as stack:
        # What draws is imported on another core meanwhile, and draws there before all else is known.
        draw = None if options.picture is None else stack.enter_context(companion(_ready_to_draw, _drawn))
        pictures = list[Callable[[], bytes]]()

        def show(ahead: Ahead) -> None:
            if draw is not None:
                pictures.append(draw(ahead))

        ahead, chosen = _ahead(options, _machine(options), show)
        if options.json is not None:
            text = json.dumps(dataclasses.asdict(ahead.outlook) | {"chosen": chosen}, indent=2) + "\n"
            if options.json == "-":
                print(text, end="")
            else:
                write_output(options.json, text.encode())
        if options.json != "-":
            from tierstream.tools.outlook import print_outlook
            from tierstream.tools.tables import open_console

            print_outlook(open_console(sys.stdout), ahead.outlook)
        if options.picture is not None:
            write_output(options.picture, pictures[0]())
    return 0


def _ahead(
    options: PlanOptions, machine: Machine, show: Callable[[Ahead], None]
) -> tuple[Ahead, dict[str, Any]]:
    """With what was chosen. See `look_ahead` for `show`."""
    from tierstream.engine.planner.choose import choose  # takes seconds to import
    from tierstream.engine.planner.outlook import look_ahead
    from tierstream.engine.planner.what_if import Setting, what_if

    setting = what_if(Setting(options, machine), options.what_if)
    config, chosen = setting.config, dict[str, Any]()
    if options.choose:
        choice = choose(config, setting.machine)
        config, chosen = choice.config, dict(choice.values)
        if options.json != "-":
            print(f"Chosen: {choice.describe()}")
    return look_ahead(config, setting.machine, price_per_hour=options.price, show=show), chosen


def _ready_to_draw() -> None:
    """The first picture of a process finds fonts and what writes PNG files."""
    from tierstream.engine.planner import picture  # noqa: F401
    from tierstream.tools.figures import new_figure, to_png

    figure = new_figure(1, 1)
    figure.add_subplot()
    to_png(figure)


def _drawn(_: None, ahead: Ahead) -> bytes:
    from tierstream.engine.planner.picture import draw_outlook
    from tierstream.tools.figures import to_png

    return to_png(draw_outlook(ahead))


def _machine(options: PlanOptions) -> Machine:
    from tierstream.engine.planner.machine import Machine
    from tierstream.engine.planner.machines import machine_file

    if options.machine is None:
        check_nvme_dirs(options.tiers.nvme_dirs or [])
        return Machine.here(options)
    file, limits = machine_file(options.machine), options.tiers.throttle.limits
    return Machine.from_profile(file, options.optimizer.threads_of, limits)
