"""The model of a run, before it has any memory; a plan needs no more of a run's parts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tierstream.engine.config import RunConfig
from tierstream.engine.model import kernels
from tierstream.engine.model.meta_model import build_meta_model
from tierstream.engine.moe.router_bias import check_bias_update
from tierstream.engine.moe.router_loss import draws_choices, router_losses
from tierstream.io.errors import ConfigError


def build_model(config: RunConfig, parts: ExitStack) -> tuple[Any, Any]:
    """The model without memory, and its configuration; with the kernels that `config.train` names.

    Args:
        parts: puts back, when it is closed, what these kernels replace for the whole process.

    Raises:
        ModelSourceError, ConfigError: see `build_meta_model`, `kernels.liger`, `router_losses` and
            `check_bias_update`.
        ConfigError: the rows of a step are to run in chunks, and routers draw random numbers.
    """
    model, hf_config = build_meta_model(config.model)
    if config.train.chunks_rows and draws_choices(model):
        raise ConfigError(
            f"train.rows_per_chunk is {config.train.rows_per_chunk}, and routers of {type(model).__name__} "
            "draw random numbers, which would be others for rows in chunks than for all rows of a step; "
            f"leave it out, or lower train.rows_per_step to {config.train.rows_per_chunk}"
        )
    router_losses(config.moe, model)
    check_bias_update(model, config.moe.bias_update_rate)
    if config.train.kernels == "liger":
        parts.enter_context(kernels.liger(model, layers=not config.train.compile))
    if config.train.compile:
        kernels.compile_layers(model, deterministic=config.train.deterministic)
    return model, hf_config
