"""The command `tierstream`: finds the subcommand, and turns errors into messages and exit statuses.

0    done
1    a bug in tierstream: traceback
2    something the user can put right: one message, or the report of `doctor`
3    the run stopped itself; nothing was lost
130  SIGINT (Ctrl-C)
143  SIGTERM
"""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from tierstream.io.errors import ConfigError, TierstreamError
from tierstream.io.limits import raise_open_files

#: Subcommand -> what it is for. Each is a module with a `main(args)`, imported when it is asked for.
COMMANDS = {
    "plan": "RUN.yaml              whether it fits, and how long it takes",
    "train": "RUN.yaml              train a model",
    "data": "preview RUN.yaml      its data, as the model will see them",
    "report": "RUN_DIR               a run as one HTML file, with plots",
    "inspect": "RUN_OR_CHECKPOINT     what a run or a checkpoint holds",
    "verify": "RUN_OR_CHECKPOINT     check every byte of a checkpoint",
    "export": "RUN_OR_CHECKPOINT OUT write a model directory for transformers",
    "bench": "storage|copy|adam|... what this machine gives",
    "convert-config": "DS_CONFIG.json        a run file from a DeepSpeed configuration",
    "check-model": "MODEL                 whether it trains as in transformers",
    "doctor": "[DIRECTORY ...]       whether it will run well on this machine",
}
#: Makes a million objects, those of torch and transformers among them, which stay until it ends. To look
#: through them for garbage, and to take them apart one by one at the end, would be a fourth of its time.
_FILLS_AND_ENDS = "plan"
#: What is said of a command that a signal has ended.
_ENDED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own). Returns the exit status."""
    if argv is not None:
        return _run(list(argv))
    args, ended = sys.argv[1:], list[int]()
    if args[:1] == [_FILLS_AND_ENDS]:
        gc.disable()
        atexit.register(_end_at_once, ended)
    ended.append(_run(args))
    return ended[0]


def _end_at_once(ended: Sequence[int]) -> None:
    """End with this status, if there is one; what was registered later is done, threads are joined."""
    if ended:
        with suppress(OSError, ValueError):  # else Python tells of what cannot be written
            _flush()
            os._exit(ended[0])


def _run(args: list[str]) -> int:
    # Layers, shards and drives open many files: ask for all that this user may have open.
    raise_open_files()
    try:
        status = _dispatch(args)
        _flush()
        return status
    except TierstreamError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print(f"tierstream: {_ENDED[number]}", file=sys.stderr)
        return 128 + int(number)
    except BrokenPipeError:  # the reader of our output has gone, as in `tierstream inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            return _fail(f"writing the output failed: {error.strerror}", 2) if _is_output(error) else _bug()
        return _fail(f"{error.filename}: {error.strerror}", 2)
    except Exception:
        return _bug()


def _is_output(error: OSError) -> bool:
    """Whether this is what a full drive under our own standard output says."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _dispatch(args: list[str]) -> int:
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    if name == "--version":
        from importlib.metadata import version

        print(f"tierstream {version('tierstream')}")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name}; {hint}")
    status: int = importlib.import_module(f"tierstream.tools.{name.replace('-', '_')}").main(args[1:])
    return status


def _usage() -> str:
    lines = ["usage: tierstream COMMAND ...", "", "Train language models larger than host memory.", ""]
    lines += [f"  {name:14} {purpose}" for name, purpose in COMMANDS.items()]
    lines += ["", "`tierstream COMMAND --help` lists the options of a command."]
    return "\n".join(lines)


def _flush() -> None:
    if sys.stdout is not None:  # closed: `tierstream ... >&-`
        sys.stdout.flush()


def _fail(message: str, status: int) -> int:
    _flush()
    print(f"tierstream: error: {message}", file=sys.stderr)
    return status


def _bug() -> int:
    _flush()
    traceback.print_exc()
    print(
        "tierstream: this is a bug in tierstream; please report it with the traceback above", file=sys.stderr
    )
    return 1
