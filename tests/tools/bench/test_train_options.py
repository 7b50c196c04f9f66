"""Options of `bench train` and the keys that they stand for."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tierstream.engine.config import RunConfig
from tierstream.engine.config_tree import leaves
from tierstream.io.errors import StorageError
from tierstream.tools.bench.train_options import (
    FIELD_OF_KEY,
    TrainBenchOptions,
    errors_name_options,
    in_options,
)

#: Options that are the benchmark's own.
OWN = {"shape", "layers", "steps", "rounds", "baseline", "turns", "peer_nvme_dir", "trace_steps", "check"}
OWN |= {"json", "report"}


def test_the_table_holds_every_option_that_stands_for_a_key() -> None:
    assert set(FIELD_OF_KEY) <= set(leaves(RunConfig))
    assert {spec.name for spec in fields(TrainBenchOptions)} == OWN | set(FIELD_OF_KEY.values())
    assert len(set(FIELD_OF_KEY.values())) == len(FIELD_OF_KEY)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("raise tiers.gpu, or lower train.rows_per_step", "raise --gpu, or lower --rows"),
        ("the DRAM budget (tiers.dram).", "the DRAM budget (--dram)."),
        ("use train.kernels: plain, or train.device: cuda", "use --kernels plain, or --device cuda"),
        ("use optimizer.placement: auto or cpu", "use --placement auto or cpu"),
        ("tiers.nvme_dirs: /a/b lies in /a", "--nvme-dirs: /a/b lies in /a"),
        ("train.compile: torch cannot compile it; use train.compile: false",
         "--compile: torch cannot compile it; use --compile false"),
        ("lower tiers.page", "lower tiers.page"),
        ("/mnt/tiers.gpu, tiers.dram.old, train.device_count, my-train.device, tiers.gpu/x",
         "/mnt/tiers.gpu, tiers.dram.old, train.device_count, my-train.device, tiers.gpu/x"),
    ],
)  # fmt: skip
def test_keys_are_shown_as_options(message: str, shown: str) -> None:
    assert in_options(message) == shown


def test_an_error_keeps_its_kind_and_what_it_knows() -> None:
    with pytest.raises(StorageError) as caught, errors_name_options():
        raise StorageError("writing", "/drive/file", OSError(28, ""), detail="raise tiers.dram")
    assert (caught.value.path, caught.value.errno) == ("/drive/file", 28)
    assert str(caught.value).endswith("; raise --dram")
