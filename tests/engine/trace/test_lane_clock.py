"""Work of a lane is timed on the clock of the device, which is read when a trace ends."""

from __future__ import annotations

import pytest
from support.rig import Setup, batches, rig

from tierstream.engine.device.device import HostLane
from tierstream.engine.trace.trace import Trace, Track


class LateStamp:
    """A point of a device with a clock of its own, which nobody may ask about before it is past."""

    DEVICE_AHEAD_S = 1e6

    def __init__(self, lane: LateLane, time_s: float) -> None:
        self._lane, self._time_s = lane, time_s

    def wait(self) -> None:
        waits_early = self._lane.busy_until_s > 0 and not self._lane.done
        assert not waits_early, "the host waits for the device in the middle of a step"
        self._lane.waits += 1
        self._lane.past_s = max(self._lane.past_s, self._time_s)

    def seconds_since(self, earlier: LateStamp) -> float:
        assert self._time_s <= self._lane.past_s
        return self._time_s - earlier._time_s


class LateLane(HostLane):
    """A device that works off its queue slower than the host fills it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.busy_until_s, self.done = 0.0, False
        self.past_s, self.waits = 0.0, 0

    def work(self, seconds: float) -> None:
        self.busy_until_s += seconds

    def stamp(self) -> LateStamp:  # type: ignore[override]
        return LateStamp(self, LateStamp.DEVICE_AHEAD_S + self.busy_until_s)


def test_a_lane_is_timed_on_its_own_clock_after_the_step() -> None:
    lane, other, trace = LateLane(), LateLane(), Trace()
    trace.start(7)
    with trace.step(lane):
        for unit in ("a", "b"):
            lane.work(0.5)  # idle
            with trace.on_lane(Track.COMPUTE, lane, "forward", unit):
                lane.work(2.0)
            with trace.on_lane(Track.UPLOAD, other, "weight", unit):
                other.work(4.0)
        lane.done = other.done = True
        waits = lane.waits
    step, a, upload, b, _ = trace.stop()
    assert (a.name, upload.name, b.name, step.name) == ("forward a", "weight a", "forward b", "step 7")
    assert (lane.waits - waits, other.waits) == (1, 1)  # a wait for each stamp takes as long as a kernel
    origin = a.begin_s - 0.5
    assert origin == pytest.approx(step.begin_s, abs=0.1)
    times = [a.begin_s, a.end_s, b.begin_s, b.end_s]
    assert [time - origin for time in times] == pytest.approx([0.5, 2.5, 3.0, 5.0])
    assert a.enqueued_s is not None
    assert b.enqueued_s is not None
    assert step.begin_s <= a.enqueued_s[0] <= a.enqueued_s[1] <= b.enqueued_s[0] <= step.end_s


class BusyLane(HostLane):
    """One that has work queued, as far as anybody knows who has not waited for it."""

    def stamp(self) -> BusyStamp:  # type: ignore[override]
        return BusyStamp()


class BusyStamp:
    def wait(self) -> None:
        raise AssertionError("the host waits for a lane that works")


def test_a_traced_step_waits_for_no_lane_that_works() -> None:
    """The updates of the step before, and with them its layers, would begin that much later."""
    with rig(Setup(trace=True)) as run:
        device, batch = run.runtime.device, list(batches(1))
        for lane in (device.compute, device.upload, device.download):
            lane.stamp = BusyLane(None).stamp  # type: ignore[method-assign]
        run.train([batch[0]])
        assert run.trace.recording
        with pytest.raises(AssertionError, match="a lane that works"):
            run.trace.stop()  # then it does: they were stamped
