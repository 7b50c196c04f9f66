from __future__ import annotations

import io
import math

import pytest
from support.steps import record

from tierstream.engine.metrics import DrivePlan, DriveTotals, PlanReport, RunSummary, TierPlan, TracedStep
from tierstream.tools.tables import count, open_console, print_plan, print_summary, table

GIB = 2**30

PLAN = PlanReport(
    parameters=1_235_814_400,
    tokens_per_step=8192,
    first_step=1,
    last_step=100,
    dtypes={"weight": "bfloat16", "master_low": "uint16", "gradient sum": "float32"},
    tiers=(
        TierPlan(tier="gpu", holds="2 of 16 layers, ends, gradient sums", used_bytes=3 * GIB),
        TierPlan(tier="dram", holds="512 pages", used_bytes=8 * GIB, limit_bytes=24 * GIB),
    ),
    logits_bytes=3 * GIB,
    extras_bytes=5 * GIB,
    bound_s={"compute": 3.1, "nvme": 4.56, "update": 0.3},
    drives=(
        DrivePlan(
            directory="/mnt/nvme0",
            path="posix-direct",
            threads=4,
            task_bytes=4 << 20,
            queue_depth=8,
            share=0.75,
            read=6e9,
            write=3.25e9,
            mixed=4e9,
        ),
        DrivePlan(
            directory="/mnt/nvme1",
            path="posix-buffered (no O_DIRECT)",
            threads=8,
            task_bytes=1 << 20,
            queue_depth=8,
            share=0.25,
            read=None,
            write=None,
            mixed=None,
        ),
    ),
    written_bytes_per_step=17 * 10**9,
)


class Latin(io.TextIOWrapper):
    """A stream that cannot say more than ASCII."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="ascii", errors="strict", write_through=True)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def printed(show: object, value: object) -> str:
    stream = io.StringIO()
    show(open_console(stream), value)  # type: ignore[operator]
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_the_plan() -> None:
    assert (
        printed(print_plan, PLAN)
        == """\
1.24G parameters: weight bfloat16, master_low uint16, gradient sum float32
steps 1 to 100, 8,192 tokens per step
Plan

 tier   holds                                    bytes          of
 ─────────────────────────────────────────────────────────────────
 gpu    2 of 16 layers, ends, gradient sums   3.00 GiB           -
 dram   512 pages                             8.00 GiB   24.00 GiB

the loss takes up to 3.00 GiB for logits, beside gpu above
what layers share takes up to 5.00 GiB, beside gpu above
/mnt/nvme0: posix-direct, 75 % of the state, 4 threads, blocks of 4.00 MiB; 6.00 GB/s read; \
3.25 GB/s written; 4.00 GB/s both at once
/mnt/nvme1: posix-buffered (no O_DIRECT), 25 % of the state, 8 threads, blocks of 1.00 MiB
drives are written at least 17 GB per step, 1.7 TB by step 100, up to 322 TB a day
A step takes at least 4.56 s, set by nvme
  (nvme 4.56 s, compute 3.1 s, update 0.3 s)"""
    )


def test_the_summary() -> None:
    summary = RunSummary(checkpoint="/runs/a/checkpoints/step-00000003")
    summary.drives = {
        "/mnt/nvme0": DriveTotals(
            path="posix-direct",
            bytes_read=15 * 10**9,
            bytes_written=9 * 10**9,
            bytes_checked=2 * 10**9,
            bytes_buffered=10**8,
        ),
        "/mnt/nvme1": DriveTotals(
            path="posix-direct", bytes_read=1, bytes_written=0, bytes_checked=0, bytes_buffered=0
        ),
    }
    for step in (1, 2, 3):
        summary.add(
            record(
                step,
                skipped=step == 2,
                step_s=5.0,
                stall_s={"weights": 1.0, "gradients": 0.25},
                tier_wait_s={"nvme_read": 2.0},
                bytes_read={"dram": 10**10, "nvme": 5 * 10**9},
                bytes_written={"nvme": 25 * 10**8},
                host_peak_bytes=5 * GIB,
                gpu_peak_bytes=0,
            )
        )
    assert (
        printed(print_summary, summary)
        == """\
Traffic of the steps

 tier        read    written   read GB/s   written GB/s   hit rate
 ─────────────────────────────────────────────────────────────────
 dram   27.94 GiB        0 B        2.00           0.00     75.0 %
 nvme   13.97 GiB   6.98 GiB        1.00           0.50          -

Waiting

 who, for what                   s   of the time
 ───────────────────────────────────────────────
 computation, for weights     3.00        20.0 %
 computation, for gradients   0.75         5.0 %
 threads, for nvme_read       6.00        40.0 %

/mnt/nvme0, in all (steps, first fill, checkpoints): 15 GB read, 9 GB written, 2 GB compared with checksums, \
0.1 GB of all through the page cache; by posix-direct
/mnt/nvme1, in all (steps, first fill, checkpoints): 1e-09 GB read, 0 GB written; by posix-direct
drives are written 43.2 TB a day at this pace
steps 1 to 3, 1 skipped: loss 3.3333, 384 tokens in 15.0 s (25.6 tok/s)
peak memory: host 5.00 GiB
checkpoint /runs/a/checkpoints/step-00000003"""
    )


def test_a_run_with_nothing_left_to_do() -> None:
    assert printed(print_summary, RunSummary()) == "No step was left to run"


def test_a_traced_run_says_what_the_device_waited_for() -> None:
    path = "/runs/" + "x" * 90 + "/trace.json"
    summary = RunSummary(trace=path)
    summary.add(record(5, stall_s={}))
    causes = [f"weights: cause {number} of many" for number in range(9)]
    for step in (3, 4):
        idle_s = {"verdict": 0.125 * (step - 3), **dict.fromkeys(causes, 0.25)}
        summary.traced.append(TracedStep(step=step, step_s=5.0, busy_s=step - 1.0, idle_s=idle_s))
    before, shown = printed(print_summary, summary).split("Traced ")
    assert "xxx" not in before
    lines = shown.splitlines()
    last = lines.index(f"{path}: open it in https://ui.perfetto.dev")
    assert lines[last + 1] == f"{path.removesuffix('.json')}.png: one of these steps as a picture"
    assert last <= 4
    assert " ".join(line.strip() for line in lines[:last]) == (
        "steps 3 to 4: computing 50.0 % of the time, else waiting for "
        f"({', '.join(f'{cause} 5.0 %' for cause in causes[:5])})"
    )


def test_a_run_that_stopped_says_why() -> None:
    summary = RunSummary(
        stopped="5 steps in a row had a gradient that is not finite", failed_checkpoints=2
    )
    summary.add(record(1, loss=math.nan, stall_s={}))
    text = printed(print_summary, summary)
    assert "Stopped early: 5 steps in a row had a gradient that is not finite" in text
    assert "loss nan" in text
    assert "2 checkpoints could not be written" in text


def test_nothing_is_wider_than_80_columns() -> None:
    long = PlanReport(
        parameters=10**12, tokens_per_step=10**9, first_step=1, last_step=10**8,
        dtypes={f"plane {i}": "float32" for i in range(20)},
        tiers=(TierPlan(tier="nvme", holds="state " * 40, used_bytes=2**60, limit_bytes=2**62),),
        bound_s={f"resource {i}": 1.0 / (i + 1) for i in range(20)},
    )  # fmt: skip
    assert max(map(len, printed(print_plan, long).splitlines())) <= 80


def test_paths_stay_in_one_piece() -> None:
    path = "/mnt/" + "x" * 200
    assert path in printed(print_summary, RunSummary(checkpoint=path))


def test_square_brackets_are_text() -> None:
    console_rows = [("[bold]dram[/bold]", "[1]")]
    assert "[bold]dram[/bold]" in printed(
        lambda console, rows: console.print(table("T", ("a", "b"), rows)), console_rows
    )


def test_an_ascii_stream_gets_ascii() -> None:
    stream = Latin()
    print_plan(open_console(stream), PLAN)
    text = stream.bytes.getvalue().decode("ascii")
    assert "|dram | 512 pages" in text


def test_no_colours_in_a_file() -> None:
    stream = io.StringIO()
    print_plan(open_console(stream), PLAN)
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (0.5, "0.5"), (25.64, "25.6"), (999, "999"), (999.6, "1.00k"), (12345, "12.3k"),
        (999_499, "999k"), (1_235_814_400, "1.24G"), (70e9, "70.0G"), (1.2e12, "1.20T"),
    ],
)  # fmt: skip
def test_counts_have_three_digits(value: float, text: str) -> None:
    assert count(value) == text
