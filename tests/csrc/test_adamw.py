"""AdamW against torch.optim.AdamW, the split master against the fp32 one, and what must not change a bit."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.native import LENGTHS, Planes, from_bf16, same_bits, to_bf16
from support.torch_adamw import CorrectlyRoundedSqrt, needs_torch_fma, one_torch_thread, padded  # noqa: F401

from tierstream import _native

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_scale": 1.0,
    "threads": 2,
}
SETTINGS = [
    pytest.param({}, id="defaults"),
    pytest.param({"weight_decay": 0.0}, id="no-decay"),
    pytest.param({"grad_scale": 0.3712345}, id="clipped"),
    pytest.param({"beta1": 0.3, "beta2": 0.5, "eps": 1e-3, "lr": 0.1}, id="lerp-from-the-gradient"),
    pytest.param({"beta1": 0.5}, id="lerp-at-one-half"),
    pytest.param({"beta1": 0.0, "beta2": 0.0}, id="no-memory"),
    pytest.param({"lr": 0.0}, id="lr-zero"),
]


class TorchAdamW:
    """torch.optim.AdamW on a copy of the planes."""

    def __init__(self, planes: Planes, settings: dict[str, Any]) -> None:
        self.count = planes.master.size
        self.param = torch.nn.Parameter(padded(planes.master))
        self.grad_scale = settings["grad_scale"]
        self.optimizer = torch.optim.AdamW(
            [self.param],
            lr=settings["lr"],
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
            foreach=False,
            fused=False,
        )

    def step(self, grad: np.ndarray) -> None:
        self.param.grad = padded(grad).mul_(self.grad_scale)
        self.optimizer.step()

    def plane(self, name: str) -> np.ndarray:
        tensor = self.param.detach() if name == "master" else self.optimizer.state[self.param][name]
        return tensor.numpy()[: self.count]


def native_step(planes: Planes, step: int, grad: np.ndarray, settings: dict[str, Any], weight=None) -> None:
    _native.adamw_fp32(planes.master, weight, planes.exp_avg, planes.exp_avg_sq, grad, step=step, **settings)


@needs_torch_fma
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("changed", SETTINGS)
def test_thirty_steps_equal_torch_to_the_bit(n: int, changed: dict[str, float]) -> None:
    settings = DEFAULTS | changed
    planes = Planes.random(n, steps=3 if n > 2000 else 30, seed=n)
    oracle = TorchAdamW(planes, settings)
    for step, grad in enumerate(planes.grads, start=1):
        native_step(planes, step, grad, settings)
        with CorrectlyRoundedSqrt():
            oracle.step(grad)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert same_bits(getattr(planes, name), oracle.plane(name)), (name, step)


@needs_torch_fma
@pytest.mark.usefixtures("one_torch_thread")
def test_torch_with_its_own_sqrt_differs_by_rounding_only() -> None:
    """The moments are equal; a root 1 ulp off moves the update by a few ulp, and the sum by 1."""
    planes = Planes.random(50_000, steps=5, seed=5)
    for step, grad in enumerate(planes.grads, start=1):
        oracle = TorchAdamW(planes, DEFAULTS)
        before = planes.master.copy()
        oracle.optimizer.state[oracle.param] = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": padded(planes.exp_avg),
            "exp_avg_sq": padded(planes.exp_avg_sq),
        }
        native_step(planes, step, grad, DEFAULTS)
        oracle.step(grad)
        assert same_bits(planes.exp_avg, oracle.plane("exp_avg"))
        assert same_bits(planes.exp_avg_sq, oracle.plane("exp_avg_sq"))
        ours, theirs = planes.master.astype(np.float64), oracle.plane("master").astype(np.float64)
        update = np.abs(ours - before.astype(np.float64) * (1 - DEFAULTS["lr"] * DEFAULTS["weight_decay"]))
        bound = np.spacing(np.abs(planes.master)).astype(np.float64) + update * 2.0**-21
        assert np.all(np.abs(ours - theirs) <= bound)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("grad_bf16", [False, True], ids=["grad-fp32", "grad-bf16"])
def test_split_master_follows_the_fp32_master_exactly(n: int, grad_bf16: bool) -> None:
    plain = Planes.random(n, steps=10, seed=n + 1)
    split = plain.copy()
    weight, low = split.split()
    plain_weight = np.empty(n, np.uint16)
    joined = np.empty(n, np.float32)
    settings = DEFAULTS | {"grad_scale": 0.7}
    for step, grad in enumerate(plain.grads, start=1):
        sent = to_bf16(grad) if grad_bf16 else grad
        native_step(plain, step, sent, settings, plain_weight)
        _native.adamw_split(weight, low, split.exp_avg, split.exp_avg_sq, sent, step=step, **settings)
        _native.join_master(weight, low, joined)
        assert same_bits(joined, plain.master)
        assert same_bits(split.exp_avg, plain.exp_avg)
        assert same_bits(split.exp_avg_sq, plain.exp_avg_sq)
        assert same_bits(plain_weight, to_bf16(plain.master))
        differ = weight != plain_weight  # ties: the split weight goes away from zero, the plain one to even
        assert np.all(low[differ] == 0x8000)


@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
def test_bf16_gradient_is_its_fp32_value(split: bool) -> None:
    a = Planes.random(1000, steps=1)
    bf16 = to_bf16(a.grads[0])
    runs = []
    for grad in (bf16, from_bf16(bf16)):
        planes = a.copy()
        weight, low = planes.split()
        if split:
            _native.adamw_split(weight, low, planes.exp_avg, planes.exp_avg_sq, grad, step=1, **DEFAULTS)
        else:
            native_step(planes, 1, grad, DEFAULTS)
        runs.append((planes.master, weight, low, planes.exp_avg, planes.exp_avg_sq))
    assert all(same_bits(x, y) for x, y in zip(*runs, strict=True))


def result(planes: Planes, settings: dict[str, Any]) -> list[bytes]:
    planes = planes.copy()
    weight, low = planes.split()
    grad = planes.grads[0]
    _native.adamw_split(weight, low, planes.exp_avg, planes.exp_avg_sq, grad, step=7, **settings)
    return [plane.tobytes() for plane in (weight, low, planes.exp_avg, planes.exp_avg_sq)]


@pytest.mark.parametrize("threads", [2, 3, 8, 1024])
def test_number_of_threads_changes_no_bit(threads: int) -> None:
    planes = Planes.random(300_001, steps=1)
    assert result(planes, DEFAULTS | {"threads": threads}) == result(planes, DEFAULTS | {"threads": 1})


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    planes = [Planes.random(200_000 + seed, steps=1, seed=seed) for seed in range(4)]
    expected = [result(p, DEFAULTS | {"threads": 1}) for p in planes]
    seen: list[list[list[bytes]]] = [[] for _ in planes]

    def call(i: int) -> None:
        for threads in (1, 2, 3, 4):
            seen[i].append(result(planes[i], DEFAULTS | {"threads": threads}))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(planes))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert seen == [[bits] * 4 for bits in expected]


@pytest.mark.parametrize("cut", [1, 5, 16, 999])
def test_page_by_page_equals_whole(cut: int) -> None:
    """An element's result does not depend on where in an array, or at which address, it stands."""
    whole = Planes.random(1000, steps=1)
    pages = whole.copy()
    native_step(whole, 1, whole.grads[0], DEFAULTS)
    for start in range(0, 1000, cut):
        part = slice(start, start + cut)
        page = Planes(pages.master[part], pages.exp_avg[part], pages.exp_avg_sq[part], [])
        native_step(page, 1, pages.grads[0][part], DEFAULTS)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert same_bits(getattr(pages, name), getattr(whole, name))


def test_flushing_of_subnormals_in_the_caller_changes_no_bit() -> None:
    planes = Planes.random(70_000, steps=1)
    planes.grads[0][:] *= np.float32(1e-30)
    expected = result(planes, DEFAULTS)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert result(planes, DEFAULTS) == expected
        assert np.float32(1e-40) * np.float32(1) == 0, "the caller's own setting is untouched"
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_spoils_only_its_element(bad: float) -> None:
    """Keeping a bad step out is the caller's part; here it must stay visible and where it is."""
    planes = Planes.random(100, steps=1)
    clean = planes.copy()
    planes.grads = [planes.grads[0].copy()]
    planes.grads[0][37] = bad
    native_step(planes, 1, planes.grads[0], DEFAULTS)
    native_step(clean, 1, clean.grads[0], DEFAULTS)
    assert np.isnan(planes.master[37])
    others = np.arange(100) != 37
    assert same_bits(planes.master[others], clean.master[others])
