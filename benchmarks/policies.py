"""How many pages a store moves under each cache policy, and the fewest that it could: on recorded trainings.

    pip install scipy
    python benchmarks/policies.py [--drive DIR] [--steps 6] [--json FILE]

Small models, dense and with experts, are trained on the CPU with their state on a drive and a part of it in
DRAM, and every page use is recorded. The same uses are then served by the store's own state machine under its
policies, and by static pins (`tierstream.tiered.replay`). All begin with no page in DRAM.

The least number of reads is exact (Belady). The least number of reads and writes is that of a linear program:
a lower bound, and exact where its solution is whole; the table says so where it is not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_array

from tierstream.engine import assemble
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.data.config import DataConfig
from tierstream.engine.device.device import Device
from tierstream.engine.measure.machine import DEFAULT_TUNING, KnownDrive
from tierstream.engine.measure.train_bench import Setting, TieredBench, random_batch
from tierstream.engine.model.build import build_model
from tierstream.engine.model.carve import units_of_run
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.shapes import architecture
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.plan import Plan, TiersConfig
from tierstream.io.scratch import ScratchFolder
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.replay import (
    Acquire,
    Begin,
    Demand,
    Discard,
    Event,
    Moved,
    RecordingStore,
    demand,
    ending,
    fewest_reads,
    foreseen,
    replay,
)

SHARES = (0.2, 0.4, 0.6, 0.8)
SEQ_LEN, VOCABULARY = 32, 512
#: What static pins leave to the pages that pass through: the least that the store runs with.
WORKING_FRAMES = 24
DENSE = architecture("tiny", 12) | {"hidden_size": 128, "intermediate_size": 352, "vocab_size": VOCABULARY}
EXPERTS = architecture("tiny-moe", 6) | {"num_experts": 16, "vocab_size": VOCABULARY}


class Run(NamedTuple):
    """A training to record. With few tokens a step some experts have none."""

    shape: Mapping[str, Any]
    idle: str
    rows: int
    page_bytes: int


RUNS = {
    "dense": Run(DENSE, "dense", 4, 32 << 10),
    "experts, dense": Run(EXPERTS, "dense", 1, 8 << 10),
    "experts, lazy": Run(EXPERTS, "lazy", 1, 8 << 10),
}


class Record(NamedTuple):
    """What was recorded."""

    layout: Layout
    plan: Plan
    frames: int
    events: list[Event]


def record(run: Run, share: float, steps: int, drive: str) -> Record:
    """Some steps with DRAM for a share of the durable state, from the first one on."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        Path(folder, "config.json").write_text(json.dumps(dict(run.shape)))
        state = stack.enter_context(ScratchFolder(drive)).path
        tiers = TiersConfig(page=ByteSize(run.page_bytes))
        config = RunConfig(
            run_dir=folder,
            model=ModelConfig(config=folder),
            data=DataConfig(files=["random tokens"], seq_len=SEQ_LEN),
            moe=MoeConfig(idle=run.idle),
            tiers=replace(tiers, nvme_dirs=[state], dram=ByteSize(0)),
            train=TrainConfig(rows_per_step=run.rows),
        )
        config.tiers.dram = ByteSize(int(share * state_bytes(replace(config, tiers=tiers), stack)))
        batches = [random_batch(VOCABULARY, run.rows, SEQ_LEN, "cpu", seed) for seed in range(steps)]
        known = [KnownDrive(state, DEFAULT_TUNING, None, None, 1.0)]
        stack.enter_context(mock.patch.object(assemble, "Store", RecordingStore))
        bench = stack.enter_context(TieredBench(config, [Setting(clip_norm=1.0)], known, batches[0]))
        store, (case,) = bench.store, bench.cases
        assert isinstance(store, RecordingStore)
        store.flush()
        store.events.clear()
        for batch in batches:
            case.runtime.step(batch)
        return Record(bench.layout, case.plan, store.stats.frame_count, list(store.events))


def state_bytes(config: RunConfig, parts: ExitStack) -> int:
    """Bytes of all durable planes."""
    model, _ = build_model(config, parts)
    units = units_of_run(model, config.moe, config.optimizer)
    _, layout = assemble.plan_run(config, units, Device())
    return layout.nbytes(durable=True)


def served(found: Record, events: Sequence[Event], window: int | None, policy: str = "lookahead") -> Moved:
    """By the store's state machine; it reads ahead as far as this part of DRAM (None: not at all)."""
    return replay(
        found.layout,
        events,
        frames=found.frames,
        policy=POLICIES[policy],
        prefetch_bytes=found.plan.dram_bytes // window if window else 0,
        writeback_bytes=found.plan.writeback_bytes,
    )


def pinned(found: Record, leased: int) -> tuple[int, int]:
    """(reads, writes) with the pages that save most in DRAM for good, and the others through a few frames."""
    few = max(WORKING_FRAMES, leased + 4)
    options: dict[str, Any] = {"policy": POLICIES["lru"], "prefetch_bytes": 0, "writeback_bytes": 0}
    streamed = replay(found.layout, found.events, frames=few, **options)
    pins = {page for page, _ in (streamed.reads + streamed.writes).most_common(found.frames - few)}
    rest = replay(found.layout, without(found.events, pins), frames=few, **options)
    first = sum(found.layout.spec(page.unit, page.plane).durable for page in pins)
    return rest.reads.total() + first, rest.writes.total()


def without(events: Sequence[Event], pins: Collection[Page]) -> Iterator[Event]:
    """The same uses, of other pages."""

    def others(pages: Sequence[Page]) -> list[Page]:
        return [page for page in pages if page not in pins]

    for event in events:
        match event:
            case Begin(schedule, following):
                yield Begin(others(schedule), others(following))
            case Acquire(number, uses, scheduled):
                yield Acquire(number, [use for use in uses if use[0] not in pins], scheduled)
            case Discard(pages):
                yield Discard(others(pages))
            case _:
                yield event


def fewest_transfers(found: Demand, frames: int) -> tuple[float, bool]:
    """(least number of reads and writes, whether it is exact; else it is a bound).

    For each gap a variable, whether it is kept; for each version of a page, whether it is written, as it must
    be once one of its gaps is not kept; for each acquire how many gaps are kept, as there are frames for.
    """
    gaps = [gap for gap in (*found.gaps, *found.unread) if gap.end > gap.begin + 1]
    read = np.array([gap.end < len(found.leased) for gap in gaps], float)
    versions = {gap.version: at for at, gap in enumerate(gaps) if gap.version is not None}
    column_of = {version: len(gaps) + at for at, version in enumerate(versions)}
    acquires, columns = len(found.leased), len(gaps) + len(versions)
    flow = lil_array((acquires, columns + acquires))
    for at in range(acquires):
        flow[at, columns + at] = 1
        if at:
            flow[at, columns + at - 1] = -1
    written = lil_array((len(gaps), columns + acquires))
    for at, gap in enumerate(gaps):
        flow[gap.begin + 1, at] = -1
        if gap.end < acquires:
            flow[gap.end, at] = 1
        written[at, at] = -1
        if gap.version is not None:
            written[at, column_of[gap.version]] = -1
    needed = np.array([-1.0 if gap.version is not None else 0.0 for gap in gaps])
    cost = np.concatenate([-read, np.ones(len(versions)), np.zeros(acquires)])
    bounds = [(0, 1)] * columns + [(0, frames - leased) for leased in found.leased]
    solved = linprog(
        cost, written.tocsr(), needed, flow.tocsr(), np.zeros(acquires), bounds=bounds, method="highs"
    )
    chosen = solved.x[:columns]
    return solved.fun + read.sum() + found.first_reads, bool(np.allclose(chosen, np.round(chosen), atol=1e-6))


def row(name: str, share: float, steps: int, drive: str) -> dict[str, Any]:
    """Counts of one recorded run: (reads, writes) of each way to serve it."""
    found = record(RUNS[name], share, steps, drive)
    known = foreseen(found.events)
    demanded = demand(found.layout, known)
    transfers, exact = fewest_transfers(demanded, found.frames)
    moved = {"lookahead, as in the run": served(found, ending(found.events), 16)}
    moved |= {f"lookahead, window {window}": served(found, known, window) for window in (4, 16, 32, None)}
    moved["lru"] = served(found, known, 16, "lru")
    counts = {policy: (each.reads.total(), each.writes.total()) for policy, each in moved.items()}
    return {
        "run": name,
        "dram": share,
        "frames": found.frames,
        "uses": sum(len(event.uses) for event in known if isinstance(event, Acquire)),
        "fewest reads": fewest_reads(demanded, found.frames),
        "fewest transfers": transfers,
        "exact": exact,
        **counts,
        "pins": pinned(found, max(demanded.leased)),
    }


def shown(row: Mapping[str, Any]) -> str:
    """Reads and all transfers above the least, in percent."""
    reads, transfers = row["fewest reads"], row["fewest transfers"]
    cells = [
        f"{100 * (count[0] / reads - 1):.1f} / {100 * (sum(count) / transfers - 1):.1f}"
        for count in row.values()
        if isinstance(count, tuple)
    ]
    least = f"{reads} / {transfers:.0f}{'' if row['exact'] else ' at least'}"
    return " | ".join(["", row["run"], f"{row['dram']:.0%}", str(row["uses"]), least, *cells, ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drive", default=".", help="directory for the state")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file for the counts")
    args = parser.parse_args()
    rows = []
    for name in RUNS:
        for share in SHARES:
            rows.append(row(name, share, args.steps, args.drive))
            if len(rows) == 1:
                heads = [key for key, value in rows[0].items() if isinstance(value, tuple)]
                print("| run | DRAM | uses | least |", " | ".join(heads), "|")
            print(shown(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
