"""The suites again over a kernel that moves a few bytes per call and interrupts every fifth one.

What test_faults.py does at the seam is done here below the C library, so that kvikio's calls meet it too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.child_pytest import LEFT_OUT, build_library, needs_stand_in, run_tests, stand_in_for_cuda

#: File -> the least number of its tests on posix, and on kvikio.
FILES = {
    "tests/io/test_conformance.py": (140, 80),
    "tests/io/test_properties.py": (4, 2),
    "tests/tiered/test_zarrdir.py": (15, 0),
    "tests/tiered/test_snapshot.py": (15, 0),
}
#: Kinds of drives whose calls are those of others.
OTHER_KINDS = "kvikio or throttled or tmpfs or open-refused"


def run_over_faulty_kernel(
    directory: Path, environment: dict[str, str], *, select: str, least: dict[str, int]
) -> tuple[int, int, int]:
    """(calls, interrupted, cut short) of the processes that ran the tests; all have passed."""
    counts = directory / "counts"
    library = build_library("faulty_io.c", directory / "libfaulty_io.so")
    # An example has thousands of calls here, each of them a chance of its own.
    profile = os.environ.get("HYPOTHESIS_PROFILE", "brief")
    environment = environment | {"LD_PRELOAD": str(library), "FAULTY_IO_COUNTS": str(counts)}
    environment = environment | {"HYPOTHESIS_PROFILE": profile}
    outcomes = run_tests(list(least), directory, environment, select=f"not ({LEFT_OUT}) and {select}")
    for file, number in least.items():
        assert outcomes[file]["passed"] >= number, (file, outcomes[file])
    lines = [[int(word) for word in line.split()] for line in counts.read_text().splitlines()]
    calls, interrupted, shortened = (sum(column) for column in zip(*lines, strict=True))
    return calls, interrupted, shortened


@pytest.mark.slow
def test_posix(tmp_path: Path) -> None:
    least = {file: posix for file, (posix, _) in FILES.items()}
    interrupts = {"FAULTY_IO_INTERRUPTS": "1"}
    calls, interrupted, shortened = run_over_faulty_kernel(
        tmp_path, interrupts, select=f"not ({OTHER_KINDS})", least=least
    )
    assert interrupted >= calls // 6 > 100_000
    assert shortened > calls // 2


@needs_stand_in
@pytest.mark.slow
def test_kvikio(tmp_path: Path) -> None:
    least = {file: kvikio for file, (_, kvikio) in FILES.items() if kvikio}
    environment = stand_in_for_cuda(tmp_path) | {"FAULTY_IO_INTERRUPTS": "1"}
    calls, interrupted, shortened = run_over_faulty_kernel(
        tmp_path, environment, select="kvikio", least=least
    )
    assert interrupted > 10_000
    assert shortened > calls // 2 > 100_000
