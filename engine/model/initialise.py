"""Seeded random weights for a new model, drawn by the family's own rules, by threads.

A stack of experts is drawn expert by expert. The host memory that this takes is that of the largest unit in
fp32, or `DRAWN_BYTES` if that is less and no single tensor takes more.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import initialization

from tierstream import _native
from tierstream.engine.model.carve import tensors_by_part
from tierstream.engine.model.meta_model import nearest_pretrained, protected
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import TensorSpec, Unit

#: Tensors that are drawn at the same time have together at most as many bytes and at most as many elements as
#: the largest unit, or there is but one of them. Many threads find enough to do in it, also where all tensors
#: are small.
DRAWN_BYTES = 256 << 20

#: `write(unit name, first element, fp32 values)`; the values are valid during the call only.
WriteRange = Callable[[str, int, NDArray[np.float32]], None]


def init_weights(
    model: Any,
    units: Iterable[Unit],
    seed: int,
    write: WriteRange,
    *,
    threads: int | None = None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Draw every tensor of `units` in fp32 and hand it to `write`.

    The values come from `_init_weights` of the model's family (norms 1, biases 0, matrices with its
    `initializer_range`). The generator is seeded per tensor from `(seed, parameter name)`, so a value depends
    on nothing else: not on the order, the cut into units, the threads, the tiers or the dtype that weights
    are computed with. A stack of experts is drawn in parts, each as a stack of one, from
    `(seed, "name[part]")`. Tied parameters are drawn once. `model` is not changed.

    Besides what `write` takes, the host memory that the largest unit takes in fp32 is in use, or
    `DRAWN_BYTES` if that is less and no tensor takes more.

    Args:
        write: called by several threads at once, for each tensor or part once, in about the order of `units`.
        threads: that draw; by default as many as torch computes with.
        progress: called, in this thread, with the bytes of fp32 values that were written since.

    Raises:
        ModelSourceError: the family's rules leave a tensor without a finite value.
    """
    threads = threads or torch.get_num_threads()
    units = list(units)
    tensors = [(unit.name, spec) for unit, spec in tensors_by_part(model, units)]
    allowed = min(DRAWN_BYTES // 4, max((unit.numel for unit in units), default=0))
    numel_max = max([allowed, *(spec.numel for _, spec in tensors)])

    @torch.no_grad()  # holds for one thread only
    def draw(unit: str, spec: TensorSpec) -> None:
        name = spec.name if spec.part is None else f"{spec.name}[{spec.part}]"
        values = _draw(model, spec, _tensor_seed(seed, name))
        if not math.isfinite(_native.sum_squares(values, 1)):
            raise ModelSourceError(
                f"the initialisation rules of {type(model).__name__} give {name} no finite value; start "
                "from a checkpoint (model.path) instead"
            )
        write(unit, spec.offset, values)

    with (
        # The generator of the CPU alone is used; fork_rng is told to skip those of CUDA.
        torch.random.fork_rng(devices=[]),
        initialization.guard_torch_init_functions(),
        protected(model.parameters()),
        # Entering a mode also sets flags of the process, which threads would restore in any order: around
        # them all, this one restores what was.
        _DrawFrom(torch.default_generator),
        ThreadPoolExecutor(threads, "tierstream-init") as pool,
    ):
        for numel in _drawn(pool, draw, tensors, threads, numel_max):
            progress(4 * numel)


def _drawn(
    pool: ThreadPoolExecutor,
    draw: Callable[[str, TensorSpec], None],
    tensors: Iterable[tuple[str, TensorSpec]],
    threads: int,
    numel_max: int,
) -> Iterator[int]:
    """Draw them, as many at a time as are allowed; yields the elements of those that have ended."""
    running: dict[Future[None], int] = {}
    for unit, spec in tensors:
        while len(running) == threads or (running and sum(running.values()) + spec.numel > numel_max):
            yield _collect(running)
        running[pool.submit(draw, unit, spec)] = spec.numel
    while running:
        yield _collect(running)


def _collect(running: dict[Future[None], int]) -> int:
    """Wait for one of them, and forget those that have ended; returns their elements. An error is raised."""
    ended = 0
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        ended += running.pop(future)
        future.result()
    return ended


def _draw(model: Any, spec: TensorSpec, seed: int) -> NDArray[np.float32]:
    """Values of one tensor: the modules around it are initialised, innermost first, with only it in memory.

    A part is a stack of one there: the rules of a family are for stacks.
    """
    *path, key = spec.name.split(".")
    # Copies of the modules around it, so that other threads do not see its memory. All else is shared.
    around = [_shallow(model)]
    for part in path:
        child = _shallow(around[-1]._modules[part])
        around[-1]._modules[part] = child
        around.append(child)
    root, owner = around[0], around[-1]
    # NaN, so that a parameter for which the family has no rule is found out. By numpy: in huge pages if they
    # are allowed, and in this thread.
    shape = spec.shape if spec.part is None else (1, *spec.shape)
    blank = np.full(shape, np.nan, np.float32)
    owner._parameters[key] = torch.nn.Parameter(torch.from_numpy(blank))
    with _DrawFrom(torch.Generator().manual_seed(seed)):
        # A family may have rules for a parameter of a child, e.g. scaled output projections.
        for depth in reversed(range(len(around))):
            nearest_pretrained(root, ".".join(path[:depth]))._init_weights(around[depth])
    return np.ravel(owner._parameters[key].detach().numpy())


def _shallow(module: Any) -> Any:
    """A copy whose parameters and children can be replaced."""
    made = copy(module)
    made._parameters, made._modules = dict(module._parameters), dict(module._modules)
    return made


class _DrawFrom(TorchDispatchMode):
    """Random operations of this thread draw from a generator of its own: the same numbers as from torch's
    default generator in the same state. Random numbers that are not torch's are not seeded."""

    _default = threading.Lock()

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        takes_generator = any(argument.name == "generator" for argument in func._schema.arguments)
        if takes_generator and isinstance(args[0], torch.Tensor) and args[0].is_cpu:
            return func(*args, **kwargs, generator=self._generator)
        # Operations that take none, such as torch.rand, and others on meta: in turn.
        with self._default:
            torch.default_generator.set_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(torch.default_generator.get_state())


def _tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
