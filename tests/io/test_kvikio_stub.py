"""kvikio's own code on host memory, on machines without the CUDA driver.

Its tests are those of the other backends; most run over a faulty kernel (test_faulty_kernel.py), the others
here. They run in a process that finds a `libcuda.so.1` built from
`libcuda_stub.c`; this process must not: other libraries would take it for a driver.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.child_pytest import (
    LEFT_OUT,
    cuda_driver_found,
    needs_stand_in,
    run_tests,
    stand_in_for_cuda,
)

#: File -> the least number of its tests on kvikio.
FILES = {
    "tests/io/test_conformance.py": 4,
    "tests/io/test_properties.py": 2,
    "tests/io/test_faults.py": 1,
    "tests/tiered/test_store_model.py": 2,
}
SELECTED = f"kvikio and (test_faults or test_properties or test_store_model or {LEFT_OUT})"


@needs_stand_in
@pytest.mark.slow
def test_other_tests_on_kvikio_pass_and_none_is_skipped(tmp_path: Path) -> None:
    outcomes = run_tests(list(FILES), tmp_path, stand_in_for_cuda(tmp_path), select=SELECTED)
    for file, least in FILES.items():
        assert set(outcomes[file]) == {"passed"}, (file, outcomes[file])
        assert outcomes[file]["passed"] >= least
    assert not cuda_driver_found(), "the stand-in has come into this process"
