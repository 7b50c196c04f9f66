"""`tierstream convert-config DS_CONFIG.json [--training-args ARGS.json] [--out RUN.yaml]`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstream.io import durable
from tierstream.io.errors import ConfigError
from tierstream.tools.convert_config import deepspeed, training_arguments
from tierstream.tools.convert_config.result import Conversion
from tierstream.tools.convert_config.source import Source
from tierstream.tools.options import parse_options, take_positionals

_DESCRIPTION = """\
Write the run file that comes nearest to a DeepSpeed configuration.
- Comments say what each setting comes from, what has no counterpart and why,
  and what is still to be filled in.
- Nothing is guessed: "auto" becomes a value only where --training-args has it.
"""


@dataclass(kw_only=True)
class _Options:
    """What to read beside the configuration, and where to write."""

    training_args: str | None = None
    """JSON file with TrainingArguments of transformers or SFTConfig of TRL, as `to_json_string()` writes
    it."""
    gpus: int = 1
    """GPUs of the run that is converted; they count where `train_batch_size` is not given."""
    out: str | None = None
    """File to write, which must not exist yet; null: standard output."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"gpus is {self.gpus}; it must be >= 1")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    files, rest = take_positionals(args, ["DS_CONFIG.json"], "tierstream convert-config")
    options = parse_options(
        _Options, rest, prog="tierstream convert-config DS_CONFIG.json", description=_DESCRIPTION
    )
    arguments = None if options.training_args is None else Source.load(Path(options.training_args))
    text = convert(Source.load(Path(files[0])), arguments, options.gpus)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    if Path(options.out).exists():
        raise ConfigError(f"{options.out} is there already; name another file with --out")
    durable.write_file(Path(options.out), text.encode())
    print(f"{options.out}: written; what it lacks is marked there with `to fill in`")
    return 0


def convert(config: Source, arguments: Source | None, gpus: int = 1) -> str:
    """The text of a run file.

    Raises:
        ConfigError: a value of the wrong type, or numbers that contradict each other.
    """
    made = Conversion()
    deepspeed.convert(config, made, gpus, with_arguments=arguments is not None)
    if arguments is not None:
        training_arguments.convert(arguments, made, gpus)
    deepspeed.leave_open(config, made)
    made.check_chunks()
    names = [config.name] if arguments is None else [config.name, arguments.name]
    return made.render(names)
