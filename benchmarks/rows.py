"""What rows cost: an epoch of samples laid out on them, and a step of tokens read.

    python benchmarks/rows.py [--samples 1000000] [--seq-len 4096] [--rows 256] [--rounds 5]

Lengths are log-normal, as those of conversations; tokens lie in memory. Medians; ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.packing import lay_out
from tierstream.engine.data.rows import Rows
from tierstream.engine.data.shards import StoreIndex, TokenStore


def seconds(rounds: int, work: Callable[[], object]) -> float:
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def store_of(lengths: np.ndarray) -> TokenStore:
    """Samples of these lengths, each trained on as a whole, in one shard."""
    tokens = np.ones(lengths.sum(), np.uint32)
    begins = np.cumsum(lengths) - lengths
    table = np.stack([begins, lengths, np.ones_like(lengths), np.arange(lengths.size) + 1])
    index = StoreIndex(
        fingerprint="made up", end_of_text_id=0, masked=False, documents=lengths.size, tokens=tokens.size,
        shards=[(lengths.size, tokens.size)], places=[(0, 0)],
    )  # fmt: skip
    return TokenStore(index, table, lambda _: tokens, ["made up"], origin="made up")


def main() -> None:
    parser = argparse.ArgumentParser(description="What rows cost.")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(5.5, 1, args.samples).astype(np.int64) + 2
    lengths = np.minimum(drawn, args.seq_len)
    order = np.arange(lengths.size)
    found = lay_out(order, lengths, args.seq_len, "whole")
    few = lengths[: max(1, 4 * args.rows * args.seq_len // int(lengths.mean()))]
    data = DataConfig(files=["made up"], seq_len=args.seq_len, packing="whole")
    rows = Rows([store_of(few)], data, rows_per_step=args.rows, seed=0)
    trained = rows.batch(0).trained_tokens  # the layout of the epoch is made by now
    facts = {
        "layout_s": seconds(args.rounds, lambda: lay_out(order, lengths, args.seq_len, "whole")),
        "filled": float(lengths.sum() / (args.seq_len * found.rows)),
        "batch_s": seconds(args.rounds, lambda: rows.batch(1)),
        "batch_trained_tokens": trained,
    }
    print(f"{args.samples:,} samples laid out in {facts['layout_s']:.2f} s, {facts['filled']:.2%} filled")
    print(f"{args.rows * args.seq_len:,} positions read in {1e3 * facts['batch_s']:.0f} ms")
    print(json.dumps(vars(args) | facts))


if __name__ == "__main__":
    main()
