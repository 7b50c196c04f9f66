"""The figures of `tierstream bench train`: speed against the bound, memory, bytes moved, waits."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from tierstream.engine.bound import Bound
from tierstream.engine.measure.machine import KnownDrive
from tierstream.engine.measure.train_bench import RunRecord, Setting
from tierstream.engine.plan import Plan
from tierstream.io.drive_rates import ACCESSES
from tierstream.io.measure import Measurement
from tierstream.tools.bench.peers import PeerCase
from tierstream.tools.bench.plots import PlotSpec
from tierstream.tools.bench.result import Details

#: What a reader must know of every result.
NOTES = [
    "P: parameters that are multiplied with (an embedding that is only looked up is none); T: tokens. "
    "6PT counts forward and backward, 8PT the recompute too; attention is not counted.",
    "The bound is that of docs/design.md, section 6, from rates measured on this machine, drives before the "
    "first round and after each.",
    "GPU peak: what the case holds and takes, without what the other cases hold beside it. Host peak: of the "
    "whole process; a peer has one of its own, all other cases share one.",
    "DRAM tier: of a run with this setting alone; here all share one. Where every unit stays on the device, "
    "it holds the state as it was last saved, and nothing of that moves in a step.",
    "Waits: computation is the thread that enqueues the device's work; threads are those that move pages.",
]
Row: TypeAlias = dict[str, str | int | float | None]
_PEAK = "gpu_peak_bytes"
_HEADINGS = {"run": "run", "layers": "layers"}


class MeasuredCase:
    """A case with all that was found of it.

    Args:
        measurement: its tokens per second.
        records: of the runs that count.
        flop_per_step: 8PT.
        bound, plan: None: it is a baseline.

    Attributes:
        measurement: with the peak of GPU memory as a label, where there is one.
    """

    def __init__(
        self,
        measurement: Measurement,
        records: Sequence[RunRecord],
        flop_per_step: float,
        bound: Bound | None = None,
        plan: Plan | None = None,
    ) -> None:
        peaks = [record.gpu_peak_bytes for record in records if record.gpu_peak_bytes is not None]
        if peaks:
            measurement = replace(measurement, labels={**measurement.labels, _PEAK: max(peaks)})
        self.measurement, self.records = measurement, records
        self.flop_per_step, self.bound, self.plan = flop_per_step, bound, plan

    @property
    def steps(self) -> int:
        return sum(len(record.losses) for record in self.records)

    def named(self, values: Row) -> Row:
        """A row of a table: which case, then the values."""
        labels = self.measurement.labels
        return {"run": labels["run"], "layers": labels["layers"], **values}

    def speed(self, tokens_per_step: int) -> Row:
        rate = self.measurement.median
        step_s = tokens_per_step / rate
        bound = self.bound
        return self.named(
            {
                "step_s": step_s,
                "tflop_per_s_6pt": 0.75 * self.flop_per_step / step_s / 1e12,
                "tflop_per_s_8pt": self.flop_per_step / step_s / 1e12,
                "bound_s": None if bound is None else bound.step_s,
                "bound_resource": None if bound is None else bound.resource,
                "time_over_bound": None if bound is None else step_s / bound.step_s,
            }
        )

    def ratios(self, baselines: Sequence[Measurement]) -> Row:
        """Its speed as a multiple of that of each baseline of its depth."""
        row: Row = {_ratio_key(baseline): None for baseline in baselines}
        for baseline in baselines:
            if baseline.labels["layers"] == self.measurement.labels["layers"]:
                row[_ratio_key(baseline)] = self.measurement.median / baseline.median
        return self.named(row)

    def memory(self) -> Row:
        peak, plan = self.measurement.labels.get(_PEAK), self.plan
        return self.named(
            {
                _PEAK: peak,
                "gpu_buffer_bytes": None if plan is None else plan.gpu_bytes,
                "host_peak_bytes": max(record.host_peak_bytes for record in self.records),
                "dram_bytes": None if plan is None else plan.dram_bytes,
                "state_bytes": None if plan is None else plan.durable_bytes,
            }
        )

    def moved(self) -> Row:
        read, written = Counter[str](), Counter[str]()
        for record in self.records:
            assert record.traffic is not None
            read.update(record.traffic.bytes_read)
            written.update(record.traffic.bytes_written)
        return self.named(
            {
                "to_gpu_bytes": written["gpu"] // self.steps,
                "from_gpu_bytes": read["gpu"] // self.steps,
                "nvme_read_bytes": read["nvme"] // self.steps,
                "nvme_written_bytes": written["nvme"] // self.steps,
            }
        )

    def waits(self) -> Iterator[Row]:
        """A row for each who waits and cause, longest first."""
        stalls, tiers = Counter[str](), Counter[str]()
        for record in self.records:
            stalls.update(record.stall_s)
            tiers.update(record.traffic.wait_s if record.traffic is not None else {})
        seconds = sum(record.seconds for record in self.records)
        for who, causes in (("computation", stalls), ("threads", tiers)):
            for cause, waited_s in causes.most_common():
                if not waited_s:
                    continue
                share = 100 * waited_s / seconds
                row: Row = {"who": who, "cause": cause, "wait_s": waited_s / self.steps, "percent": share}
                yield self.named(row)


def details(cases: Sequence[MeasuredCase], tokens_per_step: int) -> list[Details]:
    """Tables of the cases: speed, ratios where there are baselines, memory, moved, waits."""
    tiered = [case for case in cases if case.plan is not None]
    baselines = [case.measurement for case in cases if case.plan is None]
    speed = {
        "step_s": "s/step",
        "tflop_per_s_6pt": "TFLOP/s 6PT",
        "tflop_per_s_8pt": "TFLOP/s 8PT",
        "bound_s": "bound s",
        "bound_resource": "set by",
        "time_over_bound": "time/bound",
    }
    ratios = {_ratio_key(baseline): str(baseline.labels["run"]) for baseline in baselines}
    memory = {
        _PEAK: "GPU peak",
        "gpu_buffer_bytes": "device buffers",
        "host_peak_bytes": "host peak",
        "dram_bytes": "DRAM tier",
        "state_bytes": "state",
    }
    moved = {
        "to_gpu_bytes": "to the GPU",
        "from_gpu_bytes": "from the GPU",
        "nvme_read_bytes": "read from NVMe",
        "nvme_written_bytes": "written to NVMe",
    }
    waits = {"who": "who waits", "cause": "for what", "wait_s": "s/step", "percent": "% of the time"}
    speed_rows = [case.speed(tokens_per_step) for case in cases]
    ratio_rows = [case.ratios(baselines) for case in cases]
    against = [Details("ratios", "speed over that of", _HEADINGS | ratios, ratio_rows)] if baselines else []
    return [
        Details("speed", "speed, against the bound", _HEADINGS | speed, speed_rows),
        *against,
        Details("memory", "memory of each tier", _HEADINGS | memory, [case.memory() for case in cases]),
        Details("moved", "moved in a step", _HEADINGS | moved, [case.moved() for case in tiered]),
        Details(
            "waits",
            "waits, without those of no time",
            _HEADINGS | waits,
            [row for case in tiered for row in case.waits()],
            4,
        ),
    ]


def _ratio_key(baseline: Measurement) -> str:
    return f"ratio_to_{baseline.labels['run']}".replace("-", "_")


def peer_row(peer: PeerCase, layers: int, first_loss: float) -> Row:
    """What a reader must know of a peer that has run.

    Args:
        first_loss: of the first step from the tiers.
    """
    process = peer.process
    return {
        "run": peer.name,
        "layers": layers,
        "first_loss": peer.records[0].losses[0],
        "first_loss_tiered": first_loss,
        "versions": ", ".join(f"{name} {number}" for name, number in process.versions.items()),
        "settings": json.dumps(process.settings),
    }


def peer_details(rows: list[Row]) -> Details:
    """The table of the peers. Their settings are in the JSON alone."""
    headings = {
        "run": "run",
        "versions": "versions",
        "layers": "layers",
        "first_loss": "loss of step 1",
        "first_loss_tiered": "tiered",
    }
    return Details("peers", "peers; the JSON holds their settings", headings, rows, 2)


def drive_rows(times: Sequence[Sequence[KnownDrive]], layers: int) -> list[Row]:
    """What each drive gave before the first round, and after each; of what could not be measured there is no
    row.
    """
    return [
        {
            "after_round": turn,
            "layers": layers,
            "directory": str(Path(drive.directory).parent),
            **{f"{kind}_gb_per_s": getattr(drive.rates, kind) / 1e9 for kind in ACCESSES},
        }
        for turn, drives in enumerate(times)
        for drive in drives
        if drive.rates is not None
    ]


def drive_details(rows: list[Row]) -> Details:
    """The table of the drives: the bound is that of the means."""
    headings = {"after_round": "after round", "layers": "layers", "directory": "drive of"}
    rates = {f"{kind}_gb_per_s": f"{kind} GB/s" for kind in ACCESSES}
    return Details("drives", "drives, before the first round and after each", headings | rates, rows, 3)


def plots(measurements: Sequence[Measurement]) -> list[PlotSpec]:
    """Tokens per second by case; over several depths times layers, and the GPU's memory."""
    if len({measurement.labels["layers"] for measurement in measurements}) == 1:
        return [PlotSpec("speed", "Training speed", "run", ())]
    made = [PlotSpec("speed", "Training speed times depth", "layers", ("run",), times="layers")]
    if all(_PEAK in measurement.labels for measurement in measurements):
        made.append(PlotSpec("memory", "GPU memory by depth", "layers", ("run",), y=_PEAK))
    return made


def case_name(setting: Setting, settings: Sequence[Setting], more: str = "") -> str:
    """What tells the setting apart from the others. `more`: what all of them have."""
    parts = ["tiered", more] if more else ["tiered"]
    if len({each.clip_norm for each in settings}) > 1:
        parts.append("no clipping" if setting.clip_norm is None else f"clip {setting.clip_norm:g}")
    if len({each.placement for each in settings}) > 1:
        parts.append(f"update by {setting.placement}")
    if len({each.gpu for each in settings}) > 1:
        parts.append("GPU two layers" if setting.gpu is None else f"GPU {setting.gpu}")
    return ", ".join(parts)


def difference(losses: Sequence[float], resident: Sequence[float]) -> str:
    """The first step whose losses are not equal to the bit, for people; empty: all are."""
    for step, (ours, theirs) in enumerate(zip(losses, resident, strict=True), start=1):
        if struct.pack("d", ours) != struct.pack("d", theirs):
            return f"the loss of step {step} is {ours!r}, and {theirs!r} with all that fits on the device"
    return ""
