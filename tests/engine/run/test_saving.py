"""When a run is saved, what stays, and what is said, over a store of a few pages."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.crash import Crash, CrashingSyscalls
from support.faults import Call, FaultySyscalls, fail
from support.stores import all_pages, uniform_layout

from tierstream.engine.checkpoint import CheckpointConfig, checkpoints, find_resume
from tierstream.engine.run.callbacks import Callback, Callbacks
from tierstream.engine.run.saving import Saver
from tierstream.io import seam
from tierstream.io.errors import ConfigError, StorageError
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.store import Intent, Store

LAYOUT = uniform_layout(3)
PAGES = all_pages(LAYOUT)


class Log(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.saved: list[tuple[int, str]] = []

    def on_event(self, text: str) -> None:
        self.events.append(text)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.saved.append((step, path.name))


class Process:
    """One process of a run: every step writes its number into all pages."""

    def __init__(
        self, directory: Path, run_id: str = "ours", damaged: tuple[str, ...] = (), **settings: Any
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.run_id, self.log, self.now = directory, run_id, Log(), 0.0
        self.callbacks = Callbacks([self.log])
        self.store = Store(
            LAYOUT, dram_bytes=1 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0, copy_bytes=8192
        )
        runtime: Any = SimpleNamespace(
            store=self.store, layout=LAYOUT, flush=lambda: None, update_order=PAGES,
            trace=SimpleNamespace(span=lambda *_: nullcontext()),
        )  # fmt: skip
        config = CheckpointConfig(**settings)
        self.saver = Saver(
            config, directory, runtime, self.callbacks, clock=lambda: self.now, damaged=damaged
        )

    def state(self) -> dict[str, object]:
        return {"step": self.last, "run_id": self.run_id}

    def step(self, step: int, *, wait: bool = True) -> None:
        self.last = step
        with self.store.acquire([(page, Intent.OVERWRITE) for page in PAGES]) as lease:
            for array in lease.arrays:
                array.fill(step % 251)
        self.saver.after_step(step, self.state)
        if wait:
            self.saver.finish(step, self.state, save=False)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.saver.close()
        self.store.close()

    def steps(self) -> list[int]:
        """Of the checkpoints that stand; each is that of its step."""
        for step, path in checkpoints(self.directory):
            snapshot = Snapshot.open(path)
            out = np.empty(LAYOUT.spec("unit", "weight").numel, np.uint8)
            snapshot.read_range("unit", "weight", 0, out)
            assert snapshot.state["step"] == step
            assert (out == step % 251).all()
        return [step for step, _ in checkpoints(self.directory)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_by_steps_by_minutes_and_when_asked(directory: Path) -> None:
    with Process(directory, every_steps=4, every_minutes=2.0, keep=99) as run:
        for step in range(1, 13):
            run.now += 35  # 2 minutes are over at steps 4, 8, ... were it not for other checkpoints
            if step == 6:
                run.callbacks.control.save()
            run.step(step)
        assert [step for step, _ in run.log.saved] == [4, 6, 8, 12]
    with Process(directory, every_minutes=1.0, keep=99) as run:
        for step in range(13, 17):
            run.now += 40
            run.step(step)
        assert [step for step, _ in run.log.saved] == [14, 16]


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("inf"), float("nan")])
def test_minutes_that_mean_nothing_are_refused(minutes: float) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.every_minutes is .*; it must be > 0, or null"):
        CheckpointConfig(every_minutes=minutes)


@pytest.mark.parametrize(
    ("settings", "most"),
    [({}, 1), ({"at_end": False}, 0), ({"every_steps": 1}, 3), ({"every_minutes": 1, "keep_best": True}, 4)],
)
def test_checkpoints_that_stand_side_by_side(settings: dict[str, Any], most: int) -> None:
    assert CheckpointConfig(**settings).most_at_once == most


def test_a_damaged_checkpoint_stays_and_takes_no_place_of_a_whole_one(directory: Path) -> None:
    """It was passed over on resume. Once its step is written again it is one as any other."""
    with Process(directory, every_steps=4) as run:
        run.step(4)
        run.step(8)
    with Process(directory, every_steps=3, damaged=("step-00000008",)) as run:
        for step, left in [(6, [4, 6, 8]), (9, [6, 8, 9]), (12, [8, 9, 12])]:
            run.step(step)
            assert run.steps() == left
    with Process(directory, every_steps=1, damaged=("step-00000012",)) as run:
        run.step(12)
        run.step(13)
        assert run.steps() == [12, 13]


def test_order_is_by_step_and_run_whatever_the_files_say(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C53: numbers of other lengths, the newest `touch`ed to 1970, a clock set back, a later step of another
    run.
    """
    with Process(directory, run_id="theirs", every_steps=1) as other:
        other.step(9999)
    with Process(directory, every_steps=1) as run:
        for step, left in [(9, [9]), (10, [9, 10]), (100, [10, 100]), (1000, [100, 1000])]:
            run.step(step)
            newest = directory / f"step-{step:08d}"
            os.utime(newest, (0, 0))
            assert [found for found in run.steps() if found != 9999] == left
            resumed = find_resume("auto", directory, "ours", run.log.on_event, {})
            assert resumed is not None
            assert resumed.path == newest
            run.now -= 86400
    assert run.steps()[-1] == 9999
    theirs = find_resume("auto", directory, "theirs", other.log.on_event, {})
    assert theirs is not None
    assert theirs.state["step"] == 9999


def test_the_best_is_kept_by_later_processes_too(directory: Path) -> None:
    best = directory / "best"
    with Process(directory, every_steps=2, keep_best=True) as run:
        for step in range(1, 10):
            if step in (2, 3):  # the second is due for no checkpoint but for that
                run.callbacks.control.save(best=True)
            run.step(step)
        assert run.steps() == [3, 6, 8]
    assert os.readlink(best) == "step-00000003"
    assert Snapshot.open(best).state["step"] == 3
    with Process(directory, every_steps=2) as run:
        run.step(10)
        run.step(12)
        assert run.steps() == [3, 10, 12]
        run.callbacks.control.save(best=True)
        run.step(13)
        assert run.steps() == [10, 12, 13]
        run.step(14)
        assert run.steps() == [12, 13, 14]
    assert os.readlink(best) == "step-00000013"
    assert sorted(path.name for path in directory.iterdir())[0] == "best"
    assert len(list(directory.iterdir())) == 4


def test_a_checkpoint_of_the_same_step_stands_until_its_successor_does(directory: Path) -> None:
    """A run that was resumed from an earlier one comes to it again; the machine stops anywhere."""
    with Process(directory, every_steps=1) as run:
        run.step(1)
        run.step(2)
    with Process(directory, every_steps=1) as run:
        run.step(2)
        assert run.steps() == [1, 2]
        with seam.injected(FaultySyscalls(fail(errno.EIO, on="fsync", path="*manifest.json"))):
            run.step(2)
        assert run.saver.failed == 1
        assert run.steps() == [1, 2]
    for stop in range(1, 400, 23):
        copy = directory.parent / str(stop)
        shutil.copytree(directory, copy)
        machine = CrashingSyscalls(stop)
        with Process(copy, every_steps=1) as run, seam.injected(machine), suppress(Crash):
            run.step(2)
        machine.lose_unsynced(stop, copy)
        assert [step for step in run.steps() if step != 1] == [2], stop
        if not machine.stopped:
            break
    else:
        pytest.fail("it never came to an end")


def test_power_that_goes_in_a_save_or_its_rotation_costs_one_step_at_most(directory: Path) -> None:
    """C51: at 20 system calls and more; what a resume finds is whole, and the next save tidies up."""
    with Process(directory, every_steps=1) as run:
        run.step(1)
        run.step(2)
    found = []
    for stop in itertools.count(1, 7):
        copy = directory.parent / str(stop)
        shutil.copytree(directory, copy)
        machine = CrashingSyscalls(stop)
        with Process(copy, every_steps=1) as run, seam.injected(machine), suppress(Crash):
            run.step(3)
        machine.lose_unsynced(stop, copy)
        resumed = find_resume("auto", copy, "ours", run.log.on_event, {})
        assert resumed is not None
        resumed.verify()
        step = int(resumed.state["step"])  # type: ignore[call-overload]
        found.append(step)
        with Process(copy, every_steps=1) as run:
            run.step(step + 1)
            assert run.steps() == [step, step + 1]
        assert len(list(copy.iterdir())) == 2
        shutil.rmtree(copy)
        if not machine.stopped:
            break
    assert set(found) == {2, 3}
    assert len(found) >= 20


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(directory: Path) -> None:
    gate = threading.Event()

    def hold(call: Call) -> None:
        if call.name == "posix_fallocate" and "step-00000002" in call.path:
            assert gate.wait(30)

    with Process(directory, every_steps=2) as run, seam.injected(FaultySyscalls(hold)):
        run.store._copies.frames.append(np.empty(4096, np.uint8))  # a third copy: no update has to wait
        run.step(2, wait=False)
        run.step(3, wait=False)
        assert (run.steps(), run.log.events) == ([], [])
        threading.Timer(0.1, gate.set).start()
        run.step(4, wait=False)
        assert run.log.events[0] == "the checkpoint of step 4 waits for that of step 2, still being written"
        run.saver.finish(4, run.state, save=True)
        assert run.log.saved == [(2, "step-00000002"), (4, "step-00000004")]
        assert run.steps() == [2, 4]
        assert run.saver.newest == directory / "step-00000004"


def test_the_last_step_is_saved_once(directory: Path) -> None:
    with Process(directory, every_steps=2) as run:
        run.step(2, wait=False)
        run.saver.finish(2, run.state, save=True)
        assert run.log.saved == [(2, "step-00000002")]
        run.step(3, wait=False)
        run.saver.finish(3, run.state, save=True)
        assert run.steps() == [2, 3]


@pytest.fixture
def full() -> Iterator[FaultySyscalls]:
    faults = FaultySyscalls(fail(errno.ENOSPC, on="posix_fallocate", path="*/step-00000002.tmp/*", at=2))
    with seam.injected(faults):
        yield faults


def test_a_failed_checkpoint_is_said_and_counted(directory: Path, full: FaultySyscalls) -> None:
    with Process(directory, every_steps=1, every_minutes=3.0) as run:
        run.step(1)
        run.now += 30
        run.step(2)
        said = run.log.events[-1]
        assert said.startswith(f"warning: the checkpoint of step 2 failed: creating {directory}/step-0")
        assert "No space left on device" in said
        assert f"It needs 12.00 KiB in {directory}, where " in said
        assert said.endswith("the next is tried after step 3 or in 3 minutes")
        assert (run.saver.failed, isinstance(run.saver.error, StorageError)) == (1, True)
        assert os.listdir(directory) == ["step-00000001"]
        run.step(3)
        assert (run.saver.failed, run.saver.error) == (1, None)
        assert run.steps() == [1, 3]


def test_old_checkpoints_that_cannot_be_removed_cost_nothing(directory: Path) -> None:
    with Process(directory, every_steps=1, keep=1) as run:
        run.step(1)
        with seam.injected(FaultySyscalls(fail(errno.EIO, on="rename", path="*.removing"))):
            run.step(2)
        assert run.log.events[-1].startswith("warning: old checkpoints stay: renaming")
        assert (run.saver.failed, run.steps()) == (0, [1, 2])
        run.step(3)
        assert run.steps() == [3]


def test_an_error_of_the_store_ends_the_run(directory: Path) -> None:
    with Process(directory, every_steps=1) as run:
        broken = StorageError("reading", "/drive/tierstream-state/x", OSError(errno.EIO, "x"))
        run.step(1)

        def flush() -> None:
            with run.store._lock:
                run.store._fail(broken)

        run.last = 2
        capture = run.store.capture()
        flush()
        with pytest.raises(StorageError, match="tierstream-state"):
            capture.take()
        with pytest.raises(StorageError, match="tierstream-state"):
            run.step(2)


def test_leaving_waits_for_the_checkpoint_under_way(directory: Path) -> None:
    def slow(call: Call) -> None:
        if call.name == "posix_fallocate":
            time.sleep(0.05)

    with seam.injected(FaultySyscalls(slow)), Process(directory, every_steps=1) as run:
        run.step(1, wait=False)
    assert run.steps() == [1]
