"""Drives that are full, or fail: said at the start where it can be known; later a checkpoint less, or, where
it is the last one or the state itself, a clean stop. Checkpoints that stand are whole, and once there is room
the run goes on to the same bits.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import transformers
from support.command import Command, nothing_is_half_made, nothing_is_locked, use_drive
from support.drive_kinds import open_descriptors, small_ext4
from support.faults import Call, Fault, FaultySyscalls, fail
from support.runs import Unharmed, assert_ended_like, final_planes, make_run, records, unharmed_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.checkpoint import checkpoints
from tierstream.engine.config import RunConfig
from tierstream.io import seam
from tierstream.tiered import policy

STEPS = 4
#: 10 MB of state.
WIDE = 2000


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Threads and files of a run that failed are gone when its command has ended."""
    threads, files = set(threading.enumerate()), open_descriptors()
    yield
    assert [t.name for t in threading.enumerate() if t not in threads and t.name != "tqdm_monitor"] == []
    assert [name for name in open_descriptors() if name not in files and "tierstream" in name] == []


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Unharmed:
    return unharmed_run(tmp_path_factory.mktemp("unharmed"), STEPS)


@pytest.fixture
def all_that_can_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and boundaries leave DRAM before anything else, whatever the order of the threads."""
    monkeypatch.setattr(policy, "SPILL_PATIENCE", 0)


def make(folder: Path) -> RunConfig:
    """With its state on a drive and a checkpoint after every step."""
    config = make_run(folder, steps=STEPS)
    use_drive(config, folder / "state")
    config.tiers.policy = "lookahead"
    config.checkpoint.every_steps = 1
    return config


def goes_on(command: Command, config: RunConfig, unharmed: Unharmed) -> None:
    """`checkpoint.resume auto` ends where the unharmed run ended, to the bit."""
    config.checkpoint.resume = "auto"
    assert command.train(config)[::2] == (0, "")
    assert_ended_like(config, unharmed)


def only_whole_checkpoints(command: Command, config: RunConfig, *steps: int) -> None:
    """Those of `steps` and nothing else; each opens, and each of its bytes is right."""
    directory = Path(config.run_dir) / "checkpoints"
    found = checkpoints(directory)
    assert [step for step, _ in found] == list(steps)
    assert sorted(entry.name for entry in directory.iterdir()) == [path.name for _, path in found]
    for _, path in found:
        status, out, err = command.run("verify", str(path))
        assert (status, err) == (0, "")
        assert "every checksum is right" in out


@contextmanager
def small_drive(folder: Path, nbytes: int) -> Iterator[Path]:
    """A drive of its own, which nobody uses any more when the block ends."""
    with small_ext4(folder, nbytes) as drive:
        try:
            yield drive
        finally:
            gc.collect()  # tokens stay mapped into memory for as long as the run's objects live
    assert not drive.is_mount()


def fill(directory: Path, leave_bytes: int = 0) -> Path:
    """Take the space of a drive but for `leave_bytes`, from outside."""
    filler = directory / "filler"
    usage = os.statvfs(directory)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, usage.f_bavail * usage.f_frsize - leave_bytes))
        for block_bytes in () if leave_bytes else (65536, 1024):  # what ext4 keeps for root as well
            with suppress(OSError):
                while os.write(file.fileno(), bytes(block_bytes)):
                    os.fsync(file.fileno())
    left = os.statvfs(directory)
    assert left.f_bavail * left.f_frsize <= leave_bytes
    return filler


def once(happens: Callable[[Call], bool], action: Callable[[], object]) -> Fault:
    """Does `action` before the first call that `happens`."""
    lock, waiting = threading.Lock(), [True]

    def fault(call: Call) -> None:
        with lock:
            if not (waiting and happens(call)):
                return
            waiting.clear()
        action()

    return fault


@pytest.mark.parametrize("place", ["state", "checkpoints"])
def test_a_drive_that_is_too_small_is_refused_with_both_numbers(
    command: Command, tmp_path: Path, place: str
) -> None:
    """C27: before a byte of state is written; the need is at least that of the state."""
    config = make_run(tmp_path, steps=1, intermediate_size=WIDE)
    with small_drive(tmp_path, 8 << 20) as drive:
        if place == "state":
            use_drive(config, drive).joinpath("precious").write_text("not ours")
        else:
            config.run_dir = str(drive / "run")
        key = "(tiers.nvme_dirs)" if place == "state" else "(run_dir; a lower checkpoint.keep"
        said = [str(drive), "No space left on device", "free space", key]
        command.refused_train(config, said)
        _, _, err = command.train(config)
        found = re.search(r"\((\d+) bytes\) are needed there, .* \((\d+) bytes\) are free", err)
        assert found is not None, err
        usage = os.statvfs(drive)
        need_bytes, free_bytes = map(int, found.groups())
        assert free_bytes == usage.f_bavail * usage.f_frsize
        architecture = transformers.AutoConfig.from_pretrained(tmp_path / "model")
        parameters = transformers.AutoModelForCausalLM.from_config(architecture).num_parameters()
        assert need_bytes > free_bytes
        spilled_nbytes = 4 if place == "state" else 0  # of gradients; there is hardly any DRAM
        assert 12 + spilled_nbytes < need_bytes / parameters < 1.1 * (12 + spilled_nbytes)
        nothing_is_half_made(config)
        nothing_is_locked(config)
        if place == "state":
            assert sorted(entry.name for entry in drive.iterdir()) == ["lost+found", "precious"]


def test_a_drive_with_just_enough_room_is_enough(
    command: Command, tmp_path: Path
) -> None:
    """Nothing beside the state takes space there: the measurement of the drive makes way."""
    config = make_run(tmp_path, steps=2, intermediate_size=WIDE)
    config.tiers.profile = None
    with small_drive(tmp_path, 24 << 20) as drive:
        use_drive(config, drive)
        config.tiers.page, config.tiers.dram = ByteSize(65536), ByteSize(24 * 65536)
        assert command.train(config)[::2] == (0, "")
        assert [record["bytes_written"]["nvme"] > 0 for record in records(config)] == [True, True]
        shutil.rmtree(config.run_dir)  # the state that it left on the drive makes place
        assert command.train(config)[::2] == (0, "")


#: Moments of the checkpoint of step 3.
MOMENTS: dict[str, Callable[[Call], bool]] = {
    "before": lambda call: call.name == "mkdir" and call.path.endswith("step-00000003.tmp"),
    "pages": lambda call: call.name == "posix_fallocate" and "3.tmp/layers.1/exp_avg/" in call.path,
    "manifest": lambda call: call.name == "open" and "3.tmp/manifest.json" in call.path,
}


def filled_in(drive: Path, when: str) -> Fault:
    """The drive is full from a moment of the checkpoint of step 3 on."""
    return once(MOMENTS[when], lambda: fill(drive, 600 << 10 if when == "before" else 0))


@pytest.mark.parametrize("when", MOMENTS)
def test_a_drive_filled_from_outside_costs_a_checkpoint_and_not_the_run(
    command: Command, tmp_path: Path, unharmed: Unharmed, when: str
) -> None:
    """C27: the run says so and goes on; the next checkpoint is written, since by then there is room."""
    config = make(tmp_path)
    with small_drive(tmp_path, 24 << 20) as drive:
        config.run_dir = str(drive / "run")
        next_begins = once(
            lambda call: call.name == "mkdir" and call.path.endswith("step-00000004.tmp"),
            lambda: (drive / "filler").unlink(),
        )
        with seam.injected(FaultySyscalls(filled_in(drive, when), next_begins)):
            status, out, err = command.train(config)
        assert (status, err) == (0, "")
        directory = f"{config.run_dir}/checkpoints"
        said = re.search(r"warning: the checkpoint of step 3 failed: (.*)", out)
        assert said is not None, out
        assert f"{directory}/step-00000003.tmp" in said[1]
        assert "No space left on device" in said[1]
        assert re.search(rf"It needs [\d.]+ KiB in {directory}, where [\d.]+ [KM]?i?B are free now", said[1])
        assert said[1].endswith("the next is tried after step 4")
        result = json.loads(Path(config.run_dir, "result.json").read_text())
        assert result["failed_checkpoints"] == 1
        assert result["checkpoint"] == f"{directory}/step-00000004"
        only_whole_checkpoints(command, config, 2, 4)
        assert [m["loss"] for m in records(config)] == [m["loss"] for m in unharmed[1]]
        ours, planes = final_planes(config), unharmed[0]
        assert [key for key in planes if ours[key].tobytes() != planes[key].tobytes()] == []


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(
    command: Command, tmp_path: Path, unharmed: Unharmed
) -> None:
    """C27: after all steps; what stands is whole, and from there the run goes on."""
    config = make(tmp_path)
    with small_drive(tmp_path, 24 << 20) as drive:
        config.run_dir = str(drive / "run")
        with seam.injected(FaultySyscalls(filled_in(drive, "pages"))):
            said = [f"{config.run_dir}/checkpoints/step-00000004.tmp", "(run_dir; a lower checkpoint.keep"]
            command.refused_train(config, said)
        assert [m["step"] for m in records(config)] == [1, 2, 3, 4]
        result = json.loads(Path(config.run_dir, "result.json").read_text())
        assert (result["failed_checkpoints"], result["stopped"]) == (2, None)
        only_whole_checkpoints(command, config, 1, 2)
        nothing_is_locked(config)
        (drive / "filler").unlink()
        goes_on(command, config, unharmed)


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", errno.EIO), ("rename", errno.EIO), ("mkdir", errno.EROFS)]
)
def test_other_errors_of_the_checkpoints_drive_are_treated_alike(
    command: Command, tmp_path: Path, call: str, number: int
) -> None:
    config = make(tmp_path)
    with seam.injected(FaultySyscalls(fail(number, on=call, path="*/step-00000003*", times=1))):
        status, out, err = command.train(config)
    assert (status, err) == (0, "")
    assert f"errno {number}" in out
    only_whole_checkpoints(command, config, 2, 4)


def test_a_drive_of_state_filled_from_outside_lets_the_run_end(
    command: Command, tmp_path: Path, unharmed: Unharmed
) -> None:
    """C27: at step 3. The files of the state have their space. Which pages of a step spill is a matter of
    timing, so room is left for all of its gradients and activations, a third of the state.
    """
    config = make(tmp_path)
    with small_drive(tmp_path, 24 << 20) as drive:
        use_drive(config, drive)
        filled: list[Path] = []
        faults = FaultySyscalls(
            once(
                lambda call: call.name == "rename" and call.path.endswith("checkpoints/step-00000002"),
                lambda: filled.append(fill(drive, leave_bytes=500 << 10)),
            )
        )
        with seam.injected(faults):
            assert command.train(config)[::2] == (0, "")
        assert filled
        written = [call for call in faults.calls if call.name == "pwritev" and str(drive) in call.path]
        assert written
    assert [m["loss"] for m in records(config)] == [m["loss"] for m in unharmed[1]]
    ours, planes = final_planes(config), unharmed[0]
    assert [key for key in planes if ours[key].tobytes() != planes[key].tobytes()] == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "name", "plane"),
    [
        (errno.ENOSPC, "pwritev", "exp_avg"),
        (errno.EIO, "pwritev", "weight"),
        (errno.EIO, "pwritev", "grad"),
        (errno.EIO, "pwritev", "activation"),
        (errno.EIO, "preadv", "weight"),
        (errno.EIO, "preadv", "grad"),
    ],
)
def test_a_failing_drive_stops_the_step_that_needs_it(
    command: Command,
    tmp_path: Path,
    unharmed: Unharmed,
    all_that_can_spills: None,
    number: int,
    name: str,
    plane: str,
) -> None:
    """Whichever thread meets the failure, none hangs; after the checkpoint of step 2, in the middle of step
    3.
    """
    armed = threading.Event()
    failed: list[str] = []
    inside = re.compile(f"/tierstream-state/.*/{plane}/c/")

    def fault(call: Call) -> None:
        if call.name == "rename" and call.path.endswith("checkpoints/step-00000002"):
            armed.set()
        if armed.is_set() and call.name == name and inside.search(call.path):
            failed.append(call.path)
            raise OSError(number, os.strerror(number))

    config = make(tmp_path)
    with seam.injected(FaultySyscalls(fault)):
        status, _, err = command.train(config)
    assert failed
    verb = "writing" if name == "pwritev" else "reading"
    said = [f"{verb} {config.run_dir[:-3]}state/tierstream-state/", f"/{plane}/c/", f"errno {number}"]
    assert (status, err.count("tierstream: "), "Traceback" in err) == (2, 1, False)
    assert [text for text in said if text not in err] == [], err
    newest = checkpoints(Path(config.run_dir) / "checkpoints")[-1][0]
    assert newest in (2, 3)
    only_whole_checkpoints(command, config, newest - 1, newest)
    assert [m["step"] for m in records(config)] in ([*range(1, newest + 1)], [*range(1, newest + 2)])
    nothing_is_locked(config)
    goes_on(command, config, unharmed)


def test_no_room_for_what_spills(
    command: Command, tmp_path: Path, unharmed: Unharmed, all_that_can_spills: None
) -> None:
    """Files of gradients and activations are made when DRAM first runs short, in the middle of a step."""
    config = make(tmp_path)

    def fault(call: Call) -> None:
        if call.name == "posix_fallocate" and "/grad/c/" in call.path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with seam.injected(FaultySyscalls(fault)):
        said = [f"creating {tmp_path}/state/", "/grad/c/", "No space left on device", "(tiers.nvme_dirs)"]
        command.refused_train(config, said)
    nothing_is_half_made(config)
    nothing_is_locked(config)
    goes_on(command, config, unharmed)
