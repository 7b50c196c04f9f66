"""Memory that is full is said in one line, with a remedy."""

from __future__ import annotations

import pytest
import torch

from tierstream.engine.device.full import full_memory_errors
from tierstream.io.errors import BudgetError

#: More than any machine has addresses for, so that the allocation fails at once.
TOO_MUCH = 1 << 57


def test_host_memory_of_torch() -> None:
    said = rf"^host memory is full: {TOO_MUCH:,} bytes \(.*\) .*; use less$"
    with pytest.raises(BudgetError, match=said), full_memory_errors("use less"):
        torch.empty(TOO_MUCH, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "host memory is full; use less"),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 12345 bytes."),
            "host memory is full: 12,345 bytes (12.06 KiB) more were wanted at once; use less",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
            "the GPU's memory is full: CUDA out of memory; use less",
        ),
    ],
)
def test_what_is_said(error: BaseException, said: str) -> None:
    with pytest.raises(BudgetError) as raised, full_memory_errors("use less"):
        raise error
    assert str(raised.value) == said


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$"), full_memory_errors("use less"):
        raise RuntimeError("shapes")
