"""Wrong arguments: one clear error that names the argument, and nothing written."""

import ast
import inspect
import mmap
import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from tierstream import _native

SETTINGS: dict[str, Any] = {
    "step": 1,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_scale": 1.0,
    "threads": 1,
}


def split_arrays() -> dict[str, Any]:
    halves = {name: np.ones(8, np.uint16) for name in ("weight", "low")}
    return halves | {name: np.ones(8, np.float32) for name in ("exp_avg", "exp_avg_sq", "grad")}


def fp32_arrays() -> dict[str, Any]:
    arrays = split_arrays()
    del arrays["low"]
    return arrays | {"master": np.ones(8, np.float32)}


def unaligned(dtype: str) -> np.ndarray:
    return np.frombuffer(bytearray(8 * np.dtype(dtype).itemsize + 1), np.uint8)[1:].view(dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


WRONG = [
    pytest.param(lambda a: a.astype(np.float64), TypeError, "dtype must be", id="float64"),
    pytest.param(lambda a: a.astype(a.dtype.newbyteorder(">")), TypeError, "dtype must be", id="big-endian"),
    pytest.param(lambda a: a.view(np.int16), TypeError, "dtype must be", id="int16"),
    pytest.param(lambda a: a.tolist(), TypeError, "one-dimensional array .* not list", id="list"),
    pytest.param(lambda a: a[:7], ValueError, r"elements, but \w+ has", id="shorter"),
    pytest.param(lambda a: a.reshape(2, 4), ValueError, "one dimension is needed", id="two-dimensional"),
    pytest.param(lambda a: np.repeat(a, 2)[::2], ValueError, "stride is", id="strided"),
    pytest.param(lambda a: a[::-1], ValueError, "stride is -", id="reversed"),
    pytest.param(lambda a: unaligned(a.dtype.name), ValueError, "address must be", id="unaligned"),
]


@pytest.mark.parametrize("name", ["weight", "low", "exp_avg", "exp_avg_sq", "grad"])
@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_adamw_split_names_the_wrong_array(
    name: str, make: Any, error: type[Exception], message: str
) -> None:
    arrays = split_arrays()
    before = {key: array.copy() for key, array in arrays.items()}
    # The first array sets the length, so a short one shows at the second.
    named = "low" if (name, message) == ("weight", r"elements, but \w+ has") else name
    with pytest.raises(error, match=f"^{named}: .*{message}"):
        _native.adamw_split(**(arrays | {name: make(arrays[name])}), **SETTINGS)
    assert all(np.array_equal(arrays[key], before[key]) for key in arrays)


@pytest.mark.parametrize("name", ["master", "weight", "exp_avg", "exp_avg_sq", "grad"])
def test_adamw_fp32_names_the_wrong_array(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: the dtype must be"):
        _native.adamw_fp32(**(fp32_arrays() | {name: np.ones(8, np.int64)}), **SETTINGS)
    if name != "weight":
        with pytest.raises(TypeError, match=f"^{name}: .* is needed, not NoneType"):
            _native.adamw_fp32(**(fp32_arrays() | {name: None}), **SETTINGS)


@pytest.mark.parametrize("name", ["weight", "low", "exp_avg", "exp_avg_sq"])
def test_written_arrays_must_be_writable(name: str) -> None:
    arrays = split_arrays()
    with pytest.raises(ValueError, match=f"^{name}: .*read-only"):
        _native.adamw_split(**(arrays | {name: read_only(arrays[name])}), **SETTINGS)
    _native.adamw_split(**(arrays | {"grad": read_only(arrays["grad"])}), **SETTINGS)


def test_arrays_must_not_overlap() -> None:
    memory = np.ones(12, np.float32)
    arrays = split_arrays() | {"exp_avg": memory[:8], "exp_avg_sq": memory[4:]}
    with pytest.raises(ValueError, match=r"^exp_avg: shares memory with exp_avg_sq"):
        _native.adamw_split(**arrays, **SETTINGS)
    with pytest.raises(ValueError, match=r"^exp_avg: shares memory with grad"):
        _native.adamw_split(**(split_arrays() | {"exp_avg": memory[:8], "grad": memory[:8]}), **SETTINGS)
    with pytest.raises(ValueError, match=r"^src: shares memory with dst"):
        _native.round_bf16(memory, memory.view(np.uint16)[:12])
    neighbours = np.ones(16, np.float32)
    arrays = split_arrays() | {"exp_avg": neighbours[:8], "exp_avg_sq": neighbours[8:]}
    _native.adamw_split(**arrays, **SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("step", 0)],
        *[("lr", value) for value in (-1e-3, np.nan, np.inf)],
        *[(beta, value) for beta in ("beta1", "beta2") for value in (1.0, -0.1, np.nan)],
        *[(name, value) for name in ("eps", "weight_decay") for value in (-0.1, np.nan, np.inf)],
        *[("grad_scale", value) for value in (np.nan, np.inf, 1e39)],
        *[("threads", value) for value in (0, -1, 1025)],
    ],
)
@pytest.mark.parametrize("function", ["adamw_split", "adamw_fp32"])
def test_settings_out_of_range(function: str, name: str, value: float) -> None:
    arrays = split_arrays() if function == "adamw_split" else fp32_arrays()
    with pytest.raises(ValueError, match=f"^{name}: .* is not "):
        getattr(_native, function)(**arrays, **(SETTINGS | {name: value}))


def test_other_functions_name_their_arrays() -> None:
    f32, u16 = np.ones(8, np.float32), np.ones(8, np.uint16)
    with pytest.raises(TypeError, match=r"^master: "):
        _native.split_master(u16, u16.copy(), u16.copy())
    with pytest.raises(TypeError, match=r"^low: "):
        _native.join_master(u16, f32, f32.copy())
    with pytest.raises(ValueError, match=r"^dst: 7 elements, but src has 8"):
        _native.round_bf16(f32, u16[:7])
    with pytest.raises(TypeError, match=r"^grad: the dtype must be float32 or uint16"):
        _native.sum_squares(f32.astype(np.float64), threads=1)
    with pytest.raises(ValueError, match=r"^threads: 0 is not between 1 and 1024"):
        _native.sum_squares(f32, threads=0)
    with pytest.raises(TypeError, match=r"^buffer: .*not str"):
        _native.crc32c("text")
    with pytest.raises(TypeError, match=r"^buffer: the dtype must be uint8"):
        _native.crc32c(f32)


def test_arrays_on_a_memory_map_and_of_length_zero() -> None:
    with mmap.mmap(-1, 4096) as memory:
        array = np.frombuffer(memory, np.float32)
        assert _native.sum_squares(array, threads=2) == 0.0
        del array
    _native.adamw_split(**{name: array[:0] for name, array in split_arrays().items()}, **SETTINGS)
    empty = np.empty(0, np.float32)
    assert _native.sum_squares(empty, threads=3) == 0.0


def test_stub_has_the_functions_and_parameters_of_the_module() -> None:
    stub = ast.parse((files("tierstream") / "_native.pyi").read_text())
    declared = {
        node.name: [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        for node in stub.body
        if isinstance(node, ast.FunctionDef)
    }
    assert all(ast.get_docstring(node) for node in stub.body if isinstance(node, ast.FunctionDef))
    built = {
        name: re.findall(r"[(*,] ?(\w+):", inspect.getdoc(function) or "")
        for name, function in vars(_native).items()
        if callable(function) and not name.startswith("_")
    }
    assert built == declared
