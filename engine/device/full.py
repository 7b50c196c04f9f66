"""Memory that is full: an allocation of torch that fails, on the GPU or in the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tierstream.io.errors import BudgetError
from tierstream.io.sizes import format_bytes

#: What torch says of host memory, as a RuntimeError of no class of its own.
_HOST_IS_FULL = re.compile(r"DefaultCPUAllocator: .*?(\d+) bytes|DefaultCPUAllocator: not enough memory")


@contextmanager
def full_memory_errors(remedy: str) -> Iterator[None]:
    """Within, memory that is full is an error that says what to change.

    Args:
        remedy: an imperative, with the keys or options that take less.

    Raises:
        BudgetError: in place of the error of torch or Python.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise BudgetError(f"the GPU's memory is full: {reason}; {remedy}") from error
    except MemoryError as error:
        reason = f": {error}" if str(error) else ""
        raise BudgetError(f"host memory is full{reason}; {remedy}") from error
    except RuntimeError as error:
        if (found := _HOST_IS_FULL.search(str(error))) is None:
            raise
        wanted = ""
        if found[1] is not None:
            wanted = f": {int(found[1]):,} bytes ({format_bytes(int(found[1]))}) more were wanted at once"
        raise BudgetError(f"host memory is full{wanted}; {remedy}") from error
