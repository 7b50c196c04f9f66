"""What `tiers.nvme_dirs` names, where that is of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations

from tierstream.io.drives import check_directories
from tierstream.io.errors import ConfigError, naming


def check_nvme_dirs(directories: Sequence[str]) -> None:
    """Looks at them, before anything is made.

    Raises:
        StorageError: one is missing, no directory or not writable.
        ConfigError: two are the same, through a link, or one lies in the other.
    """
    with naming("tiers.nvme_dirs"):
        check_directories((directory, 0) for directory in directories)
    for one, other in combinations(directories, 2):
        paths = [os.path.realpath(one), os.path.realpath(other)]
        if paths[0] == paths[1]:
            raise ConfigError(
                f"tiers.nvme_dirs: {one} and {other} are the same directory ({paths[0]}); name it once"
            )
        if os.path.commonpath(paths) in paths:
            outer, inner = sorted(paths, key=len)
            raise ConfigError(f"tiers.nvme_dirs: {inner} lies in {outer}; name one of them, or another")
