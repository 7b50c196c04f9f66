"""Products of several experts at once: each its own, and nothing of the others."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstream.engine.device.device import PRODUCT_ROWS, Device
from tierstream.engine.moe.products import groups, together

COUNTS = [3, 1, 16, 5]


def made(dtype: torch.dtype, width: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(COUNTS), 16), (len(COUNTS), 16, width), (len(COUNTS), width)]
    x, matrices, biases = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x.requires_grad_(), matrices.requires_grad_(), biases.requires_grad_()


def results(device: Device, dtype: torch.dtype, width: int = 32) -> list[torch.Tensor]:
    """The product with biases, and its gradients."""
    x, matrices, biases = made(dtype, width)
    (rows,) = groups(device, [COUNTS])
    out = rows.plus(rows.product(x, matrices.unbind(), transposed=False), biases.unbind())
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, matrices, biases])]


def plain(dtype: torch.dtype, width: int = 32) -> list[torch.Tensor]:
    x, matrices, biases = made(dtype, width)
    expert = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    out = torch.cat([x[expert == n] @ matrices[n] + biases[n] for n in range(len(COUNTS))])
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, matrices, biases])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_has_its_own_rows(dtype: torch.dtype) -> None:
    for found, expected in zip(results(Device(), dtype), plain(dtype), strict=True):
        assert torch.equal(found, expected)


def test_one_kernel_for_all_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[torch.Tensor]()
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(x: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        called.append(offs)
        return grouped_mm(x, matrices, offs=offs)

    monkeypatch.setattr(Device, "multiplies_groups", True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    for found, expected in zip(results(Device(), torch.bfloat16), plain(torch.bfloat16), strict=True):
        assert torch.equal(found, expected)
    assert [offs.tolist() for offs in called] == [[3, 4, 20, 25]]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 32), (torch.bfloat16, 33)])
def test_what_the_kernel_does_not_take_is_multiplied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    monkeypatch.setattr(Device, "multiplies_groups", True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    for found, expected in zip(results(Device(), dtype, width), plain(dtype, width), strict=True):
        assert torch.equal(found, expected)


def test_few_numbers_of_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each new one costs the choice of a kernel."""
    rows = set[int]()
    matmul = torch.Tensor.__matmul__

    def counted(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        rows.add(len(x))
        return matmul(x, matrix)

    expected = plain(torch.float32)
    monkeypatch.setitem(PRODUCT_ROWS, "cpu", 8)
    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    found = results(Device(), torch.float32)
    assert rows == {8, 16}
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)


@given(st.lists(st.integers(1, 100)), st.integers(1, 8), st.integers(1, 300))
def test_groups_are_neighbours_and_no_larger_than_they_may_be(
    counts: list[int], experts: int, rows: int
) -> None:
    parts = together(counts, experts, rows)
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(len(counts)))
    for part, after in zip_longest(parts, parts[1:]):
        size, total = part.stop - part.start, sum(counts[part])
        assert 1 <= size <= experts
        assert size == 1 or total <= rows
        # Nor smaller: the next one would be too much.
        assert after is None or size == experts or total + counts[after.start] > rows
