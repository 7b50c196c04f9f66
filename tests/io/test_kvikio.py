"""What is kvikio's alone: where it cannot run and why, device arrays cut into tasks.

What it has in common with other backends is in test_conformance.py, and test_kvikio_stub.py runs that on
machines without the CUDA driver.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.child_pytest import cuda_driver_found

from tierstream.io import kvikio_backend
from tierstream.io.backend import open_backend
from tierstream.io.errors import ConfigError, InvariantError
from tierstream.io.kvikio_backend import DeviceBytes, cuda_device_present, kvikio_problem
from tierstream.io.transfer import Direction


@pytest.mark.skipif(cuda_driver_found(), reason="the driver is here")
def test_without_a_driver_it_is_refused_with_the_remedy() -> None:
    assert not cuda_device_present()
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1 is not on this machine: use the backend posix"):
        open_backend("kvikio")
    automatic = open_backend("auto")
    assert automatic.name == "posix"
    automatic.close()


@pytest.mark.parametrize(
    ("version", "accepted"), [("26.02.00", False), ("26.04.00", True), ("27.02.01", True)]
)
def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool) -> None:
    monkeypatch.setattr(kvikio_backend.ctypes, "CDLL", lambda name: object())
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(__version__=version))
    assert ("is older than" not in kvikio_problem()) == accepted


class FakeDeviceArray:
    def __init__(self, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": typestr,
            "data": (0x7000, False),
            "strides": strides,
            "version": 3,
        }


def test_device_arrays_are_cut_by_bytes() -> None:
    array = FakeDeviceArray((3, 5), "<V2", strides=(10, 2))
    view = DeviceBytes(array, Direction.READ, "file")
    assert view.nbytes == 30
    part = view[4:30][2:10]
    assert part.__cuda_array_interface__ == {
        "shape": (8,),
        "typestr": "|u1",
        "data": (0x7006, False),
        "strides": None,
        "version": 3,
    }
    assert part._array is array


def test_strided_device_arrays_are_refused() -> None:
    with pytest.raises(InvariantError, match="not C-contiguous"):
        DeviceBytes(FakeDeviceArray((3, 5), "<f4", strides=(40, 4)), Direction.WRITE, "file")
