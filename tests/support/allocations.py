"""What torch allocates on the CPU, counted by its profiler: the same tensors live as long on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], object]) -> int:
    """The most that was allocated at once, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    kineto = profiler.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
