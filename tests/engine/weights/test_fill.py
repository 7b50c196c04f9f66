"""First values of the whole state, wherever they come from, and filling that was cut off."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from support.children import in_a_child
from support.command import use_drive
from support.families import save_family
from support.filling import Filling, Heard, Interrupted, Planes, fill_and_be_killed, interrupt
from support.models import rewrite, save_model
from support.runs import assert_ended_like, dump, make_run, unharmed_run

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.data.progress import Progress
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.plan import STATE_FOLDER
from tierstream.engine.trainer import Trainer
from tierstream.engine.weights import fill
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run from a model directory of three layers."""
    save_model(tmp_path / "source")
    config = make_run(tmp_path)
    config.model = ModelConfig(path=str(tmp_path / "source"))
    return config


@pytest.fixture
def on_drives(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The same on two drives; every layer is recorded."""
    monkeypatch.setattr(fill, "PORTION_BYTES", 1)
    config.tiers.nvme_dirs = [str(tmp_path / "one"), str(tmp_path / "other")]
    return config


def filled(config: RunConfig) -> tuple[Planes, Heard]:
    heard = Heard()
    return Filling(config).fill(heard), heard


def in_dram(config: RunConfig) -> Planes:
    """What is right: nothing is taken over there."""
    drives, config.tiers.nvme_dirs = config.tiers.nvme_dirs, None
    planes, _ = filled(config)
    config.tiers.nvme_dirs = drives
    return planes


@pytest.mark.parametrize("origin", ["weights", "random", "snapshot"])
def test_it_is_told_to_its_end(config: RunConfig, tmp_path: Path, origin: str) -> None:
    heard, snapshot, what = Heard(), None, f"loading {config.model.path}"
    if origin == "random":
        config.model = ModelConfig(config=str(tmp_path / "source"))
        what = "drawing random weights"
    nbytes = 4 * Filling(config).units.numel
    if origin == "snapshot":
        what = f"loading {tmp_path / 'snapshot'}"

        def save(progress: Progress) -> None:
            if progress.done == progress.total:
                write_snapshot(first.store, tmp_path / "snapshot", {"step": 3, "router_biases": {}})

        first = Filling(config)
        first.fill(Heard(save))
        snapshot = Snapshot.open(tmp_path / "snapshot")
        nbytes = sum(spec.nbytes for spec in snapshot.planes.values())
    Filling(config, snapshot).fill(heard)
    assert [progress.done for progress in heard.told] == sorted({progress.done for progress in heard.told})
    assert {(progress.what, progress.total) for progress in heard.told} == {(what, nbytes)}
    assert heard.told[-1] == Progress(what, nbytes, nbytes)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_killed_it_goes_on_to_the_same_bits(on_drives: RunConfig, tmp_path: Path, share: float) -> None:
    run_file = dump(on_drives, tmp_path / "run.yaml")
    with pytest.raises(BrokenProcessPool):
        in_a_child(fill_and_be_killed, str(run_file), share)
    planes, heard = filled(on_drives)
    units = Filling(on_drives).units
    total, first = 4 * units.numel, 4 * units.embed.parameters
    assert heard.told[0].done > first
    assert heard.told[-1] == Progress(f"loading {on_drives.model.path}", total, total)
    assert "are on the drives from a start that was cut off" in heard.events[0]
    assert planes == in_dram(on_drives)


@pytest.mark.parametrize("family", ["qwen3_moe", "random"])
def test_experts_and_random_weights_go_on_too(on_drives: RunConfig, tmp_path: Path, family: str) -> None:
    if family == "random":
        on_drives.model = ModelConfig(config=str(tmp_path / "source"))
    else:
        shutil.rmtree(tmp_path / "source")
        save_family(tmp_path / "source", family)
    interrupt(on_drives, 0.8)
    planes, heard = filled(on_drives)
    assert len(heard.events) == 1
    assert planes == in_dram(on_drives)


def change_source(config: RunConfig) -> None:
    rewrite(
        Path(str(config.model.path)) / "model.safetensors",
        lambda tensors: tensors.update({name: value + 1 for name, value in tensors.items()}),
    )


def change_epsilon(config: RunConfig) -> None:
    file = Path(str(config.model.path)) / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def record_of(config: RunConfig) -> Path:
    return Path((config.tiers.nvme_dirs or [])[0]) / "filled.json"


def change_page_size(config: RunConfig) -> None:
    config.tiers.page = ByteSize(16384)


def damage_record(config: RunConfig) -> None:
    data = bytearray(record_of(config).read_bytes())
    data[len(data) // 2] ^= 1
    record_of(config).write_bytes(data)


def lose_a_page(config: RunConfig) -> None:
    file = next(Path((config.tiers.nvme_dirs or [])[1]).glob("embed/weight/c/*"))
    os.truncate(file, file.stat().st_size // 2)


def use_a_drive_elsewhere(config: RunConfig) -> None:
    """A store that was made on one of them alone, and ended; the record on the other stands."""
    drives, config.tiers.nvme_dirs = config.tiers.nvme_dirs, [(config.tiers.nvme_dirs or [])[1]]
    filled(config)
    config.tiers.nvme_dirs = drives


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_source, "is of other weights"),
        (change_epsilon, "is of other configuration of the model"),
        (change_page_size, "is of other page size; page size follows from tiers.page or, where"),
        (damage_record, "filled.json is damaged"),
        (lose_a_page, "1 files of units that were filled are not there"),
        (use_a_drive_elsewhere, "is older than what is in the directories"),
    ],
)
def test_what_is_in_doubt_is_loaded_again(
    on_drives: RunConfig, change: Callable[[RunConfig], None], said: str
) -> None:
    interrupt(on_drives, 0.9)
    change(on_drives)
    planes, heard = filled(on_drives)
    assert [said in text for text in heard.events] == [True]
    assert heard.events[0].startswith("warning: the state is filled from the beginning: ")
    assert heard.told[0].done < 0.2 * (heard.told[0].total or 0)
    assert planes == in_dram(on_drives)


def test_other_software_begins_anew(on_drives: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(on_drives, 0.9)
    monkeypatch.setattr(fill, "version", lambda name: "another")
    planes, heard = filled(on_drives)
    assert ["is of other software" in text for text in heard.events] == [True]
    assert planes == in_dram(on_drives)


def test_a_small_state_is_not_recorded(config: RunConfig, tmp_path: Path) -> None:
    config.tiers.nvme_dirs = [str(tmp_path / "drive")]
    planes, _ = filled(config)
    assert not record_of(config).exists()
    assert planes == in_dram(config)


def test_a_run_whose_start_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its first step ends the record."""
    monkeypatch.setattr(fill, "PORTION_BYTES", 1)
    unharmed = unharmed_run(tmp_path / "unharmed", 1)
    config = make_run(tmp_path / "run", steps=1)
    record = use_drive(config, tmp_path / "drive") / STATE_FOLDER / "filled.json"

    def stop(progress: Progress) -> None:
        if progress.what == "drawing random weights" and progress.done > 0.8 * (progress.total or 0):
            raise Interrupted

    with pytest.raises(Interrupted):
        Trainer(config, [Heard(stop)]).run()
    assert record.exists()
    heard = Heard()
    Trainer(config, [heard]).run()
    assert [text for text in heard.events if "are on the drives from a start that was cut off" in text]
    assert not record.exists()
    assert_ended_like(config, unharmed)
