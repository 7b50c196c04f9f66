"""The plan of a run on a machine, which need not be this one. No torch."""

from __future__ import annotations

from tierstream.engine.config import RunConfig
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan import Plan, make_plan
from tierstream.io.errors import ConfigError
from tierstream.tiered.layout import Layout


def plan_on(
    config: RunConfig, units: ModelUnits, cores: int, available_bytes: int, *, device_in_host: bool
) -> tuple[Plan, Layout]:
    """`make_plan` for this run, on a machine with so many cores and so much free host memory.

    Args:
        device_in_host: the device is the CPU.

    Raises:
        BudgetError: a tier cannot hold what it must hold at once.
        ConfigError: see `_check_rows`.
    """
    _check_rows(config, units)
    return make_plan(
        config.tiers,
        config.optimizer,
        units,
        rows=config.train.rows_per_step,
        seq_len=config.data.seq_len,
        device_in_host=device_in_host,
        update_threads=config.optimizer.threads_of(cores),
        available_bytes=available_bytes,
        expert_nbytes=config.moe.gpu_cache,
        copy_memory=config.checkpoint.copy_memory if config.checkpoint.on_the_way else 0,
    )


def _check_rows(config: RunConfig, units: ModelUnits) -> None:
    """Refuse a run whose rows are to run through layers in chunks and cannot.

    Raises:
        ConfigError: experts would be streamed several times, or no dimension of what layers exchange is known
            to hold the rows.
    """
    train = config.train
    if train.chunks_rows and units.anatomy.rows_dim is None:
        raise ConfigError(
            f"train.rows_per_chunk is {train.rows_per_chunk}, and rows of this model cannot run apart: what "
            "its layers exchange does not have them in one known dimension; leave it out, or lower "
            f"train.rows_per_step to {train.rows_per_chunk}"
        )
    if train.chunks_rows and any(units.experts):
        raise ConfigError(
            f"train.rows_per_chunk is {train.rows_per_chunk}, and single experts are streamed once for all "
            f"{train.rows_per_step} rows of a step: leave it out, use moe.stream: layers, or lower "
            f"train.rows_per_step to {train.rows_per_chunk}"
        )
