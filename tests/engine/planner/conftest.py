"""For tests of plans: as if they ran in a process of their own."""

from __future__ import annotations

import os
import threading

import pytest


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores are allowed, and threads of the tests' own tools are not counted."""
    count, before = threading.active_count, threading.active_count()
    monkeypatch.setattr(threading, "active_count", lambda: 1 + count() - before)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
