"""kvikio's own code on host memory, on machines without the CUDA driver.

Its tests are those of the other backends. They run in a process that finds a `libcuda.so.1` built from
`libcuda_stub.c`; this process must not: other libraries would take it for a driver.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.child_pytest import cuda_driver_found, needs_stand_in, run_tests, stand_in_for_cuda

#: File -> the least number of its tests on kvikio.
FILES = {
    "tests/io/test_conformance.py": 80,
    "tests/io/test_properties.py": 2,
    "tests/io/test_faults.py": 1,
    "tests/tiered/test_store_model.py": 2,
}


@needs_stand_in
@pytest.mark.slow
def test_every_test_on_kvikio_passes_and_none_is_skipped(tmp_path: Path) -> None:
    outcomes = run_tests(list(FILES), tmp_path, stand_in_for_cuda(tmp_path), select="kvikio")
    for file, least in FILES.items():
        assert set(outcomes[file]) == {"passed"}, (file, outcomes[file])
        assert outcomes[file]["passed"] >= least
    assert not cuda_driver_found(), "the stand-in has come into this process"
