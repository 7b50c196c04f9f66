"""The kvikio backend: run against a stand-in for the CUDA driver, and what it says where it cannot run.

The suite itself is test_conformance.py. Here it is started in a process that finds a `libcuda.so.1` built
from `libcuda_stub.c`, so that kvikio's own code moves host memory on machines without a driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierstream.io import kvikio_backend
from tierstream.io.backend import open_backend
from tierstream.io.errors import ConfigError, InvariantError
from tierstream.io.kvikio_backend import DeviceBytes, cuda_device_present, kvikio_problem
from tierstream.io.transfer import Direction

HERE = Path(__file__).parent
needs_kvikio = pytest.mark.skipif(
    importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed"
)


def driver_found() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@needs_kvikio
@pytest.mark.skipif(driver_found(), reason="the driver is here: test_conformance.py runs without a stand-in")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is needed to build the stand-in")
def test_conformance_with_a_stand_in_for_the_driver(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, HERE / "libcuda_stub.c"],
        check=True,
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "kvikio",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [*command, str(HERE / "test_conformance.py"), str(HERE / "test_properties.py")],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    summary = run.stdout.splitlines()[-1] if run.stdout else ""
    passed = re.search(r"(\d+) passed", summary)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) > 50
    assert "skipped" not in summary


@pytest.mark.skipif(driver_found(), reason="the driver is here")
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
