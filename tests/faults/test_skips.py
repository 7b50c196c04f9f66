"""Steps that change nothing: gradients that are not finite, and steps without a trained token. And what the
records say of steps that do: clipping, dtypes, bytes written.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import Command, use_drive
from support.runs import final_planes, make_run, records, snapshot_planes, train

from tierstream.engine.config import RunConfig
from tierstream.engine.data.rows import Batch, Rows
from tierstream.engine.metrics import PlanReport, StepMetrics
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.step.gradients import GradientBuffers
from tierstream.engine.step.head import Head
from tierstream.engine.trainer import Trainer
from tierstream.io.posix import probe
from tierstream.tiered.layout import Unit
from tierstream.tiered.snapshot import Snapshot

#: Of the corpus of `test_a_step_without_a_trained_token_changes_nothing` it leaves one token in the last row.
SEQ_LEN = 5


def spoil_gradients(
    monkeypatch: pytest.MonkeyPatch, value: float, steps: Collection[int], unit: str = "embed"
) -> None:
    """One element of a unit's gradient becomes `value` in these steps (from 1), when backward is through."""
    close, seen = GradientBuffers.close, itertools.count(1)

    def closing(self: GradientBuffers, closed: Unit) -> None:
        if closed.name == unit and next(seen) in steps:
            self._open[unit][1][closed.tensors[0].offset] = value
        close(self, closed)

    monkeypatch.setattr(GradientBuffers, "close", closing)


def leave_out(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """The rows of these steps (from 1) are never seen; those that follow move up."""
    batch = Rows.batch

    def shifted(self: Rows, step: int) -> Batch:
        kept = (number for number in itertools.count() if number + 1 not in steps)
        return batch(self, next(itertools.islice(kept, step, None)))

    monkeypatch.setattr(Rows, "batch", shifted)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def learnt(found: list[dict]) -> list[tuple]:
    """What a step learnt, without its number."""
    return [(m["loss"], m["grad_norm"], m["clip_factor"], m["lr"], m["optimizer_step"]) for m in found]


def make(folder: Path, steps: int, *, drive: bool = False) -> RunConfig:
    """Its learning rates do not depend on the number of steps, so that runs of several can be compared."""
    config = make_run(folder, steps=steps)
    config.optimizer.schedule = "constant"
    if drive:
        use_drive(config, folder / "drive")
    return config


@pytest.mark.parametrize(("value", "drive"), [(math.inf, False), (math.nan, True)])
def test_a_skipped_step_is_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, drive: bool
) -> None:
    """Two skipped steps, the second of them the first after an update: moments, counter and schedule stay."""
    skipped = {1, 4}
    config = make(tmp_path / "with", 6, drive=drive)
    with monkeypatch.context() as patch:
        spoil_gradients(patch, value, skipped)
        train(config)
    without = make(tmp_path / "without", 4)
    leave_out(monkeypatch, skipped)
    train(without)
    found = records(config)
    assert [m["skipped"] for m in found] == [m["step"] in skipped for m in found]
    assert [m["skipped_total"] for m in found] == [1, 1, 1, 2, 2, 2]
    assert [m["sample_ids"] is not None for m in found] == [m["skipped"] for m in found]
    assert set(found[0]["sample_ids"]) <= {f"{name}:1" for name in config.data.files}
    assert [m["optimizer_step"] for m in found] == [0, 1, 2, 2, 3, 4]
    assert [repr(found[step - 1]["grad_norm"]) for step in sorted(skipped)] == [repr(value)] * 2
    assert found[0]["lr"] == found[1]["lr"]
    assert found[3]["lr"] == found[4]["lr"]
    assert learnt([m for m in found if not m["skipped"]]) == learnt(records(without))
    ours = Snapshot.open(Path(config.run_dir) / "checkpoints" / "step-00000006")
    assert (ours.state["applied_updates"], ours.state["skipped_total"]) == (4, 2)
    assert same(snapshot_planes(ours), final_planes(without))


@pytest.mark.parametrize("limit", [None, 2])
def test_skips_in_a_row_end_the_run_as_it_began(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """C11: every gradient is NaN."""
    config = make(tmp_path / "run", 20)
    if limit is not None:
        config.optimizer.max_skipped_in_a_row = limit
    limit = limit or 5
    with monkeypatch.context() as patch:
        spoil_gradients(patch, math.nan, range(1, 100))
        said = [f"{limit} steps in a row", f"step {limit}", f"{limit} skipped in all", "after 0 updates"]
        Command(capsys, tmp_path).refused_train(config, [*said, "Lower optimizer.lr"], status=3)
    found = records(config)
    assert [m["step"] for m in found] == list(range(1, limit + 1))
    assert {(m["skipped"], m["optimizer_step"], m["lr"]) for m in found} == {
        (True, 0, config.optimizer.lr / (config.optimizer.warmup_steps + 1))
    }
    result = json.loads((Path(config.run_dir) / "result.json").read_text())
    assert result["skipped_steps"] == limit
    assert f"{limit} steps in a row" in result["stopped"]
    kept = Snapshot.open(Path(config.run_dir) / "checkpoints" / f"step-{limit:08d}")
    assert kept.state["applied_updates"] == 0
    still = make(tmp_path / "still", 1)  # a learning rate of 0 leaves the weights as they began
    still.optimizer.lr = 0.0
    train(still)
    began = final_planes(still)
    for (unit, plane), values in snapshot_planes(kept).items():
        if plane.startswith("exp_avg"):
            assert not values.any(), (unit, plane)
        else:
            assert values.tobytes() == began[unit, plane].tobytes(), (unit, plane)


def test_nothing_is_lost_when_skips_end_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates since the last checkpoint are saved, and `resume auto` goes on behind the skipped steps."""
    config = make(tmp_path / "run", 6, drive=True)
    config.optimizer.max_skipped_in_a_row = 2
    command = Command(capsys, tmp_path)
    with monkeypatch.context() as patch:
        spoil_gradients(patch, math.inf, {3, 4})
        command.refused_train(config, ["2 steps in a row", "after 2 updates"], status=3)
    config.checkpoint.resume = "auto"
    assert command.train(config)[::2] == (0, "")
    without = make(tmp_path / "without", 4)
    leave_out(monkeypatch, {3, 4})
    train(without)
    assert [m["step"] for m in records(config)] == list(range(1, 7))
    assert learnt([m for m in records(config) if not m["skipped"]]) == learnt(records(without))
    assert same(final_planes(config), final_planes(without))


@pytest.mark.parametrize(("value", "drive"), [(math.nan, False), (math.inf, True)])
def test_a_gradient_that_was_applied_unchecked_ends_the_run_and_spoils_no_checkpoint(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    drive: bool,
) -> None:
    """In backward nothing is skipped: the run ends, and goes on from its last checkpoint as the message
    says.
    """
    config = make(tmp_path / "run", 6, drive=drive)
    config.optimizer.clip_norm, config.optimizer.check_finite = None, False
    config.checkpoint.every_steps = 2
    command, kept = Command(capsys, tmp_path), Path(config.run_dir) / "checkpoints"
    with monkeypatch.context() as patch:
        spoil_gradients(patch, value, {4}, unit="layers.1")
        said = [
            "gradient of update 4 is not finite",
            "check_finite is false",
            "resume from its last checkpoint",
        ]
        command.refused_train(config, said, status=3)
    assert [path.name for path in kept.iterdir()] == ["step-00000002"]
    assert [m["step"] for m in records(config)] == [1, 2, 3]
    assert not (Path(config.run_dir) / "result.json").exists()
    config.checkpoint.resume, config.optimizer.check_finite = "auto", True
    assert command.train(config)[::2] == (0, "")
    sound = make(tmp_path / "sound", 6)
    sound.optimizer.clip_norm = None
    train(sound)
    assert learnt(records(config)) == learnt(records(sound))
    assert same(final_planes(config), final_planes(sound))


@pytest.mark.parametrize("drive", [False, True], ids=["dram", "nvme"])
def test_a_step_without_a_trained_token_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: bool
) -> None:
    """C35: the last row of an epoch holds nothing but the end of a document, which predicts nothing."""

    def small(folder: Path, steps: int) -> RunConfig:
        config = make(folder, steps, drive=drive and folder.name == "with")
        for file, text in zip(config.data.files, ["the tier holds pages of it", "and the step"], strict=True):
            Path(file).write_text(text)
        config.train.rows_per_step = config.train.rows_per_chunk = 1
        config.data.seq_len = SEQ_LEN
        return config

    config = small(tmp_path / "with", 12)
    train(config)
    found = records(config)
    empty = {m["step"] for m in found if m["trained_tokens"] == 0}
    assert empty
    assert empty < set(range(1, 13))
    for m in found:
        if m["step"] in empty:
            assert math.isnan(m["loss"])
            assert (m["grad_norm"], m["clip_factor"], m["skipped"], m["skipped_total"]) == (
                0.0,
                1.0,
                False,
                0,
            )
    assert [m["optimizer_step"] for m in found] == [
        sum(step not in empty for step in range(1, m["step"] + 1)) for m in found
    ]
    result = json.loads((Path(config.run_dir) / "result.json").read_text())
    assert math.isfinite(result["loss"])
    without = small(tmp_path / "without", 12 - len(empty))
    leave_out(monkeypatch, empty)
    train(without)
    assert learnt([m for m in found if m["step"] not in empty]) == learnt(records(without))
    assert same(final_planes(config), final_planes(without))


def test_the_record_tells_whether_a_step_was_clipped(tmp_path: Path) -> None:
    """C05: the norm is that before clipping, so both runs give the same one, and the factor says the rest."""
    norms = []
    for name, limit in (("tight", 0.01), ("loose", 1e9), ("none", None)):
        config = make(tmp_path / name, 1)
        config.optimizer.clip_norm = limit
        train(config)
        (record,) = records(config)
        norms.append(record["grad_norm"])
        assert record["clip_factor"] == (0.01 / (norms[0] + 1e-6) if limit == 0.01 else 1.0)
    assert norms[0] > 0.02
    assert norms == [norms[0]] * 3


def test_a_log_says_what_became_of_each_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C05, C11: step 1 is clipped, the gradient of step 2 has an inf, step 3 comes to NaN in the loss."""
    config = make(tmp_path, 4)
    spoil_gradients(monkeypatch, math.inf, {2})
    loss_and_gradient, steps = Head.loss_and_gradient, itertools.count(1)

    def spoilt(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        factor = math.nan if next(steps) == 3 else 1.0
        losses, gradient = loss_and_gradient(*args, **options)
        return losses * factor, gradient * factor

    monkeypatch.setattr(Head, "loss_and_gradient", spoilt)
    status, out, err = Command(capsys, tmp_path).train(config)
    assert (status, err) == (0, "")
    clipped, infinite, not_a_number, last = records(config)
    said = out.splitlines()
    assert [line.split(":")[0] for line in said if ": first clipped step: " in line] == ["step 1"]
    norm, factor = f"{clipped['grad_norm']:.4g}", f"{clipped['clip_factor']:.4g}"
    assert f"norm {norm} is above optimizer.clip_norm 0.5, so it was multiplied with {factor}; norms" in out
    for record, norm, loss in ((infinite, "inf", f"{infinite['loss']:.4g}"), (not_a_number, "nan", "nan")):
        step, samples = record["step"], ", ".join(record["sample_ids"])
        (line,) = (line for line in said if line.startswith(f"step {step}/4  SKIPPED  loss "))
        assert f"norm {norm}" in line
        (line,) = (line for line in said if line.startswith(f"step {step}: "))
        assert line == (
            f"step {step}: the gradient is not finite (norm {norm}, loss {loss}): skipped, nothing has "
            f"changed; {step - 1} in a row of at most 5; its samples: {samples}"
        )
    assert [line for line in said if line.startswith("steps 1 to 4, 2 skipped: loss ")]
    text = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert '"grad_norm": Infinity' in text[1]
    assert '"loss": NaN' in text[2]
    assert (last["skipped"], last["skipped_total"], last["optimizer_step"]) == (False, 2, 2)


class Plan(Callback):
    """Keeps the plan."""

    def on_plan(self, plan: PlanReport) -> None:
        self.plan = plan


@pytest.mark.parametrize(
    ("dtype", "master", "expected"),
    [
        ("bfloat16", "split", {"weight": "bfloat16", "master_low": "uint16"}),
        ("bfloat16", "fp32", {"weight": "bfloat16", "master": "float32"}),
        ("float32", "split", {"weight": "float32"}),
    ],
)
def test_the_dtypes_of_the_plan_are_those_on_the_drive_and_in_the_checkpoint(
    tmp_path: Path, dtype: str, master: str, expected: dict[str, str]
) -> None:
    """C07."""
    config = make(tmp_path, 1, drive=True)
    config.model.dtype, config.optimizer.master = dtype, master  # type: ignore[assignment]
    observer = Plan()
    Trainer(config, [observer]).run()
    expected = expected | {"exp_avg": "float32", "exp_avg_sq": "float32"}
    stored = expected | {"grad": "float32"}
    assert observer.plan.dtypes == stored | {"gradient sum": "float32"}
    snapshot = Snapshot.open(Path(config.run_dir) / "checkpoints" / "step-00000001")
    assert {spec.plane: spec.dtype for spec in snapshot.planes.values()} == expected
    for root, planes in ((snapshot.path, expected), (tmp_path / "drive" / "tierstream-state", stored)):
        found = {
            file.parent.name: json.loads(file.read_text())["data_type"]
            for file in root.glob("*/*/zarr.json")
            if file.parent.name != "activation"
        }
        assert found == planes, root


class Written(Callback):
    """What the kernel says that this process wrote, after every step."""

    def __init__(self) -> None:
        self.kernel: list[int] = []
        self.reported: list[int] = []

    def on_step(self, metrics: StepMetrics) -> None:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        self.kernel.append(int(fields["write_bytes"]))
        self.reported.append(metrics.bytes_written["nvme"])


def test_the_bytes_written_are_those_that_the_kernel_counts(tmp_path: Path) -> None:
    """C31: ten steps, within 5 %."""
    config = make(tmp_path, 11, drive=True)
    if not probe(tmp_path / "drive").direct:
        pytest.skip(f"{tmp_path} does not take direct I/O")
    observer = Written()
    Trainer(config, [observer]).run()
    kernel = observer.kernel[-1] - observer.kernel[0]
    reported = sum(observer.reported[1:])
    assert reported > 5 << 20
    assert abs(reported - kernel) < 0.05 * kernel, (reported, kernel)
    # Each step has its own, though a write-back may begin before or after the end of a step.
    assert max(observer.reported[2:]) < 1.5 * min(observer.reported[2:])
    (drive,) = json.loads((Path(config.run_dir) / "result.json").read_text())["drives"].values()
    assert drive["path"] == "posix-direct"
    # First values and the last flush too, so more than in the steps.
    assert drive["bytes_written"] > sum(observer.reported)
    assert 0 < drive["bytes_checked"] < drive["bytes_read"]
