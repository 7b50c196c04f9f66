"""Tests run again in a process of their own, where the libraries under them are other ones."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Not over a faulty kernel: tests of millions of calls, and those that fall short by themselves.
LEFT_OUT = "odd_layer or two_gib or short_interrupted"


def cuda_driver_found() -> bool:
    """Whether this process finds the CUDA driver, without which kvikio moves nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


needs_stand_in = pytest.mark.skipif(
    cuda_driver_found() or importlib.util.find_spec("kvikio") is None,
    reason="no stand-in is needed beside the CUDA driver, nor of use without kvikio "
    "(pip install --no-deps --requirement kvikio-for-tests.txt)",
)


def build_library(source: str, target: Path) -> Path:
    """Compile a C file of this folder to the shared library `target`, whose name is also its soname."""
    names = (os.environ.get("CXX", "g++"), "g++", "clang++")
    compiler = next((name for name in names if shutil.which(name)), None)
    assert compiler is not None, "building tierstream takes a compiler, and so does this test"
    options = ["-x", "c", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{target.name}"]
    subprocess.run([compiler, *options, HERE / source, "-o", target], check=True)
    return target


def stand_in_for_cuda(directory: Path) -> dict[str, str]:
    """Build a `libcuda.so.1` that knows no device; returns the environment in which a process finds it."""
    build_library("libcuda_stub.c", directory / "libcuda.so.1")
    return {"LD_LIBRARY_PATH": str(directory)}


def run_tests(
    files: list[str], directory: Path, environment: dict[str, str], *, select: str
) -> dict[str, Counter[str]]:
    """Outcomes (passed, failed, skipped) per file of the tests in `files` that `select` (pytest's -k) names.

    Args:
        files: paths from the root of the repository.
        directory: for the report.
        environment: added to that of this process.
    """
    report = directory / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    run = subprocess.run(
        [*command, "-k", select, *files],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    outcomes: dict[str, Counter[str]] = {file: Counter() for file in files}
    for case in ET.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[file][kinds.pop() if kinds else "passed"] += 1
    return outcomes
