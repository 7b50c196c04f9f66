"""Machines by their names: profiles in the format of `tierstream bench --profile`.

`h200` was measured as far as docs/measurements says. The figures of the others are those of datasheets, times
what the H200 machine reached of its own: 0.7 of the peak of a matrix product, 0.8 of the link, 0.85 of
memory, 0.95 of a drive. An update moves 28 bytes of memory for each parameter.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from tierstream.io.errors import ConfigError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def machine_file(name: str) -> Path:
    """The profile of a machine that comes with tierstream, or the file `name`.

    Raises:
        ConfigError: there is neither.
    """
    if (known := _FOLDER / f"{name}.json").is_file():
        return known
    if Path(name).is_file():
        return Path(name)
    nearest = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the machines are {', '.join(names())}"
    raise ConfigError(f"--machine {name} is neither a machine that is known nor a file; {hint}")
