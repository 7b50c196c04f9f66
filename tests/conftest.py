"""For all tests: hypothesis profiles, torch's threads, and no GPU tests where there is no GPU."""

import gc
import os
import sys
import tempfile

import pytest
from hypothesis import settings

# As `tierstream train` does: threads of torch that wait must not hold a core that another process needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Verdicts on architectures are found once for all test processes, not among those of whoever runs the tests.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="tierstream-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHE.name

# `ci` gives the same examples at every run, `brief` the first of them; `nightly` looks for new ones:
# HYPOTHESIS_PROFILE=nightly pytest
settings.register_profile("ci", max_examples=60, derandomize=True, deadline=None, print_blob=True)
settings.register_profile("brief", settings.get_profile("ci"), max_examples=25)
settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # The tensors of the tests are small: more threads than this cost more than they bring. Torch is slow to
    # import, so it is set up only where a collected test has imported it already.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # Every run of a test collects garbage, and would look through all that torch and pytest hold, every time.
    gc.collect()
    gc.freeze()
