"""What a step takes beside its bound, measured in miniature."""

from __future__ import annotations

import pytest

from tierstream.engine.device.device import Device
from tierstream.engine.measure import step_rates


def test_all_figures_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_COPY_BYTES": 1 << 16, "_CPU_BYTES": 1 << 16, "_PAGES": 4, "_LAUNCHES": 4}.items():
        monkeypatch.setattr(step_rates, name, value)
    device = Device("cpu")
    host, own = step_rates.host_figures(), step_rates.device_figures(device)
    device.close()
    assert set(host) == {"bytes", "cores", "memory", "copy", "page_s", "wake_s"}
    assert set(own) == {"bytes", "memory", "launch_s"}
    assert min(*host.values(), *own.values()) > 0
