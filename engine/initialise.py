"""Seeded random weights for a new model, drawn by the family's own rules, one tensor in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import initialization

from tierstream.engine.meta_model import nearest_pretrained, protected
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import Unit

#: `write(unit name, first element, fp32 values)`; the values are valid during the call only.
WriteRange = Callable[[str, int, NDArray[np.float32]], None]


def init_weights(model: Any, units: Iterable[Unit], seed: int, write: WriteRange) -> None:
    """Draw every tensor of `units` in fp32 and hand it to `write`.

    The values come from `_init_weights` of the model's family (norms 1, biases 0, matrices with its
    `initializer_range`). The generator is seeded per tensor from `(seed, parameter name)`, so a value depends
    on nothing else: not on the order, the cut into units, the tiers or the dtype that weights are computed
    with. Tied parameters are drawn once.

    Raises:
        ModelSourceError: the family's rules leave a tensor without a finite value.
    """
    modules = dict(model.named_modules())
    # The generator of the CPU alone is used; torch.manual_seed would also touch the CUDA ones, which fork_rng
    # is told to skip.
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        initialization.guard_torch_init_functions(),
        protected(model.parameters()),
    ):
        for unit in units:
            for spec in unit.tensors:
                torch.default_generator.manual_seed(_tensor_seed(seed, spec.name))
                values = _draw(model, modules, spec.name)
                if not np.isfinite(values.sum(dtype=np.float64)):
                    raise ModelSourceError(
                        f"the initialisation rules of {type(model).__name__} give {spec.name} no finite "
                        "value; start from a checkpoint (model.path) instead"
                    )
                write(unit.name, spec.offset, values)
                del values  # else two tensors are in memory while the next one is drawn


def _draw(model: Any, modules: dict[str, Any], name: str) -> NDArray[np.float32]:
    """Values of one parameter: the modules around it are initialised, innermost first, with only it in
    memory."""
    owner_name, _, key = name.rpartition(".")
    owner = modules[owner_name]
    meta = owner._parameters[key]
    # NaN, so that a parameter for which the family has no rule is found out.
    owner._parameters[key] = torch.nn.Parameter(torch.full(meta.shape, torch.nan))
    try:
        around: str | None = owner_name
        while (
            around is not None
        ):  # a family may have rules for a parameter of a child, e.g. scaled output projections
            nearest_pretrained(model, around)._init_weights(modules[around])
            around = around.rpartition(".")[0] if around else None
        return owner._parameters[key].detach().numpy().reshape(-1)
    finally:
        owner._parameters[key] = meta


def _tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
