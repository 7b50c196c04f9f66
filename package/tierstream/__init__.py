"""tierstream trains language models whose state is larger than host memory, at full precision, on one GPU.

    from tierstream import RunConfig, Trainer

    Trainer(RunConfig.from_file("run.yaml", {"optimizer.lr": 1e-5})).run()

The subpackages, each a top-level folder of the repository, import only downward:

- `tierstream.tools`: the command line and its reports
- `tierstream.engine`: training, a layer at a time
- `tierstream.tiered`: the store of GPU buffers, DRAM and NVMe
- `tierstream.io`: moving bytes to and from files
- `tierstream._native`: the optimizer, sums, casts and checksums on the CPU
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstream.engine.config import RunConfig
    from tierstream.engine.run.callbacks import Callback
    from tierstream.engine.trainer import Trainer

__all__ = ["Callback", "RunConfig", "Trainer"]
__version__ = version("tierstream")

#: Imported when they are asked for: torch takes seconds.
_HOMES = {
    "Callback": "tierstream.engine.run.callbacks",
    "RunConfig": "tierstream.engine.config",
    "Trainer": "tierstream.engine.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
