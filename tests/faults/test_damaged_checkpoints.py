"""A checkpoint with a wrong bit, a missing or a short file is refused by name, by every command that reads
it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import Command, nothing_is_half_made, nothing_is_locked, use_drive
from support.runs import final_planes, make_run, train

from tierstream.engine.config import RunConfig


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run of two steps with a checkpoint after each."""
    config = make_run(tmp_path_factory.mktemp("finished"), steps=2)
    config.checkpoint.every_steps = 1
    train(config)
    return config


def flip_a_bit(file: Path) -> None:
    """In the middle of the file; its size stays."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("plane", ["weight", "master_low", "exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_in_a_checkpoint_is_refused(
    command: Command, tmp_path: Path, two_checkpoints: RunConfig, plane: str
) -> None:
    """By resume, verify and export; the drive is free again, and a sound checkpoint resumes to the bit."""
    config = make_run(tmp_path, steps=2)
    use_drive(config, tmp_path / "drive")
    kept = Path(two_checkpoints.run_dir) / "checkpoints"
    damaged = tmp_path / "damaged"
    shutil.copytree(kept / "step-00000001", damaged)
    chunk = damaged / "layers.1" / plane / "c" / "0"
    flip_a_bit(chunk)
    config.checkpoint.resume = str(damaged)
    command.refused_train(
        config, said=[str(chunk), f"plane layers.1/{plane} has CRC-32C", "another checkpoint"]
    )
    nothing_is_half_made(config)
    nothing_is_locked(config)
    readers = [["verify", str(damaged)]]
    if plane == "weight":  # the only plane that an export in bf16 reads
        readers.append(["export", str(damaged), str(tmp_path / "exported")])
    for args in readers:
        command.refused(*args, said=[str(chunk), f"plane layers.1/{plane} has CRC-32C"])
    assert not (tmp_path / "exported").exists()
    config.checkpoint.resume = str(kept / "step-00000001")
    assert command.train(config)[::2] == (0, "")
    same = final_planes(config)
    expected = final_planes(two_checkpoints)
    assert same.keys() == expected.keys()
    assert [key for key in same if same[key].tobytes() != expected[key].tobytes()] == []


@pytest.mark.parametrize("on_drive", [True, False])
def test_auto_goes_on_from_the_newest_checkpoint_that_is_whole(
    command: Command, tmp_path: Path, two_checkpoints: RunConfig, on_drive: bool
) -> None:
    """To the bits of the run that was never damaged; what is damaged can be seen only in its pages."""
    config = make_run(tmp_path, steps=2)
    if on_drive:
        use_drive(config, tmp_path / "drive")
    shutil.rmtree(config.run_dir, ignore_errors=True)
    shutil.copytree(two_checkpoints.run_dir, config.run_dir)
    older, newest = sorted((Path(config.run_dir) / "checkpoints").iterdir())
    chunk = newest / "layers.1" / "exp_avg" / "c" / "0"
    flip_a_bit(chunk)
    config.checkpoint.resume = "auto"
    status, said, error = command.train(config)
    assert (status, error) == (0, "")
    (warning,) = [line for line in said.splitlines() if "not resumed from" in line]
    assert str(chunk) in warning
    assert f"{older} is taken" in warning
    assert f"the checkpoint of step 1, {older}" in said
    expected, found = final_planes(two_checkpoints), final_planes(config)
    assert [key for key in expected if found[key].tobytes() != expected[key].tobytes()] == []

    for path in (older, newest):
        flip_a_bit(path / "layers.1" / "exp_avg" / "c" / "0")
    both = [str(path / "layers.1") for path in (older, newest)]
    command.refused_train(config, said=["no checkpoint in", *both])
    assert {older, newest} <= set(newest.parent.iterdir()), "a person may want to look at them"


def test_auto_passes_over_damage_where_run_dir_is_relative(
    command: Command, tmp_path: Path, two_checkpoints: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint tells its absolute path: it must be known again, or loading begins anew without end."""
    config = make_run(tmp_path, steps=2)
    shutil.copytree(two_checkpoints.run_dir, config.run_dir, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    config.run_dir, config.checkpoint.resume = f"../{tmp_path.name}/run", "auto"
    flip_a_bit(Path("run/checkpoints/step-00000002/layers.1/exp_avg/c/0"))
    status, said, error = command.train(config)
    assert (status, error) == (0, "")
    assert said.count("not resumed from") == 1
    assert "state: the checkpoint of step 1, " in said


def test_who_names_a_damaged_checkpoint_is_told_another(
    command: Command, tmp_path: Path, two_checkpoints: RunConfig
) -> None:
    config = make_run(tmp_path, steps=2)
    copy = tmp_path / "copy"
    shutil.copytree(Path(two_checkpoints.run_dir) / "checkpoints", copy)
    flip_a_bit(copy / "step-00000002" / "layers.1" / "exp_avg" / "c" / "0")
    (copy / "best").symlink_to("step-00000002")
    for name in ("step-00000002", "best"):
        config.checkpoint.resume = str(copy / name)
        command.refused_train(config, said=["is damaged", f"checkpoint.resume: {copy / 'step-00000001'}"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "manifest.json").unlink(), ["is incomplete", "manifest.json is missing"]),
        (lambda path: (path / "embed/weight/c/1").unlink(), ["is incomplete", "embed/weight/c/1 is missing"]),
        (lambda path: os.truncate(path / "embed/weight/c/1", 4096), ["is damaged", "has 4096 bytes", "8192"]),
        (lambda path: flip_a_bit(path / "manifest.json"), ["manifest.json"]),
        (lambda path: shutil.rmtree(path), ["there is no such directory"]),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    command: Command,
    tmp_path: Path,
    two_checkpoints: RunConfig,
    spoil: Callable[[Path], None],
    said: list[str],
) -> None:
    config = make_run(tmp_path, steps=2)
    copy = tmp_path / "copy"
    shutil.copytree(Path(two_checkpoints.run_dir) / "checkpoints" / "step-00000001", copy)
    spoil(copy)
    config.checkpoint.resume = str(copy)
    command.refused_train(config, said=[str(copy), *said])
    assert not Path(config.run_dir).exists()
