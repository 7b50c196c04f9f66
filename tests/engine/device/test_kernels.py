"""The GPU's arithmetic, compiled for the CPU with its intrinsics as the IEEE operations that they are,
against the CPU's kernels: equal bits. On a GPU the real thing is compared.
"""

from __future__ import annotations

import ctypes
import inspect
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.native import from_bf16, to_bf16

from tierstream import _native
from tierstream.engine.device.kernels import SOURCE, AdamW, CudaKernels, HostKernels

COUNT = 20_011
SETTINGS: list[dict[str, float]] = [
    {},
    {"weight_decay": 0.0, "grad_scale": 0.3712345},
    {"beta1": 0.3, "beta2": 0.5, "eps": 1e-3, "lr": 0.1},
    {"beta1": 0.0, "beta2": 0.0},
    {"lr": 0.0},
]

_SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __shared__ static
static void __syncthreads() {}
struct Index { int x; };
static Index blockIdx{0}, threadIdx{0}, blockDim{1}, gridDim{1};
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
#define SUM_THREADS 1
"""


def settings_of(changed: dict[str, float], step: int) -> AdamW:
    values: dict[str, Any] = {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 1.0,
    }  # fmt: skip
    return {**values, **changed, "step": step}  # type: ignore[typeddict-item]


def planes_of(kind: str, grad: str, seed: int) -> dict[str, np.ndarray]:
    """Numbers of every size, with zeros, subnormals, infinities and the largest."""
    generator = np.random.default_rng(seed)

    def numbers() -> np.ndarray:
        values = generator.standard_normal(COUNT) * 10.0 ** generator.integers(-44, 12, COUNT)
        values[:6] = [0.0, -0.0, 1e-45, -1e-39, 3.3e38, -3.4e38]
        return values.astype(np.float32)

    gradient = numbers()
    gradient[10:12] = [np.inf, np.nan]
    planes = {"exp_avg": numbers(), "exp_avg_sq": np.abs(numbers())}
    planes["grad"] = gradient if grad == "grad_fp32" else to_bf16(gradient)
    master = numbers()
    if kind == "split":
        planes |= {"weight": np.empty(COUNT, np.uint16), "master_low": np.empty(COUNT, np.uint16)}
        _native.split_master(master, planes["weight"], planes["master_low"])
    elif kind == "master":
        planes |= {"weight": to_bf16(master), "master": master}
    else:
        planes["weight"] = master
    return planes


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Planes that differ in a bit, NaN payloads apart."""
    found = []
    for plane in a:
        x, y = a[plane], b[plane]
        as_float = [v if v.dtype == np.float32 else from_bf16(v) for v in (x, y)]
        both_nan = np.isnan(as_float[0]) & np.isnan(as_float[1])
        if plane == "master_low":
            both_nan = np.isnan(from_bf16(a["weight"])) & np.isnan(from_bf16(b["weight"]))
        bits = np.uint16 if x.dtype.itemsize == 2 else np.uint32
        if not np.all((x.view(bits) == y.view(bits)) | both_nan):
            found.append(plane)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("device_kernels")
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(_SHIM + Path(SOURCE).read_text())
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "needs the compiler that the package was built with"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


KINDS = pytest.mark.parametrize("kind", ["split", "master", "fp32"])
GRADS = pytest.mark.parametrize("grad", ["grad_fp32", "grad_bf16"])


@KINDS
@GRADS
@pytest.mark.parametrize("changed", SETTINGS)
def test_the_source_compiled_for_the_cpu_gives_the_bits_of_the_cpu_kernels(
    compiled: ctypes.CDLL, kind: str, grad: str, changed: dict[str, float]
) -> None:
    ours, expected = planes_of(kind, grad, 3), planes_of(kind, grad, 3)
    names = {"split": ["weight", "master_low"], "master": ["master", "weight"], "fp32": ["weight"]}[kind]
    for step in (1, 2, 7):
        settings = settings_of(changed, step)
        HostKernels().adamw({name: torch.from_numpy(values) for name, values in expected.items()}, settings)
        arrays = [ours[name] for name in (*names, "exp_avg", "exp_avg_sq", "grad")]
        getattr(compiled, f"adamw_{kind}_{grad}")(
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_int(COUNT),
            *map(ctypes.c_double, _native.adamw_scalars(**settings)),
        )
        assert differing(ours, expected) == []


def test_the_source_compiled_for_the_cpu_sums_squares(compiled: ctypes.CDLL) -> None:
    values = np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)
    out = np.zeros(1)
    compiled.sum_squares(
        ctypes.c_void_p(values.ctypes.data), ctypes.c_int(COUNT), ctypes.c_void_p(out.ctypes.data)
    )
    assert out[0] == pytest.approx(_native.sum_squares(values, threads=1), rel=1e-13)


def test_torch_still_compiles_kernels_at_run_time() -> None:
    """The one function of torch that is not in its documentation; every version must be looked at."""
    parameters = inspect.signature(torch.cuda._compile_kernel).parameters
    assert list(parameters)[:2] == ["kernel_source", "kernel_name"]


@pytest.mark.gpu
@KINDS
@GRADS
@pytest.mark.parametrize("changed", SETTINGS)
def test_a_gpu_gives_the_bits_of_the_cpu(kind: str, grad: str, changed: dict[str, float]) -> None:
    device = torch.device("cuda")
    ours, expected = planes_of(kind, grad, 5), planes_of(kind, grad, 5)
    on_gpu = {name: torch.from_numpy(values).to(device) for name, values in ours.items()}
    for step in (1, 2, 7):
        settings = settings_of(changed, step)
        CudaKernels(device).adamw(on_gpu, settings)
        HostKernels().adamw({name: torch.from_numpy(values) for name, values in expected.items()}, settings)
        assert differing({name: v.cpu().numpy() for name, v in on_gpu.items()}, expected) == []


@pytest.mark.gpu
def test_a_gpu_sums_squares_the_same_every_time() -> None:
    device = torch.device("cuda")
    values = np.random.default_rng(1).standard_normal(3_000_017).astype(np.float32)
    kernels, on_gpu = CudaKernels(device), torch.from_numpy(values).to(device)
    outs = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(3)]
    for out in outs:
        kernels.sum_squares(on_gpu, out)
    assert len({out.item() for out in outs}) == 1
    assert outs[0].item() == pytest.approx(_native.sum_squares(values, threads=1), rel=1e-13)
    on_gpu[1234567] = float("nan")
    kernels.sum_squares(on_gpu, outs[0])
    assert torch.isnan(outs[0]).item()
