"""From a Hugging Face checkpoint to units: which stored tensor becomes which parameter, then the values.

Names go through transformers' own conversion (`engine/weights/conversion.py`), so what loads here is what
`from_pretrained` loads. Unlike it, nothing is ever left to a random initialisation: a missing, unexpected or
mis-shaped tensor ends the run before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.initialise import WriteRange
from tierstream.engine.model.meta_model import read_hf_config
from tierstream.engine.weights.conversion import Conversion, ResolvedNames, resolve_names
from tierstream.engine.weights.mxfp4 import Mxfp4Stack
from tierstream.engine.weights.safetensors_dir import CheckpointDir, open_checkpoint, some
from tierstream.engine.weights.tensor_entry import STORED_DTYPES
from tierstream.io.errors import InvariantError, ModelSourceError
from tierstream.tiered.layout import TensorSpec, Unit

#: Host memory that loading may take for its buffers.
LOAD_BUFFER_BYTES = 16 << 20
#: Elements per slice when two stored copies of a tensor are compared.
COMPARE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class LoadPlan:
    """Where every tensor of a model comes from.

    Attributes:
        parameters: parameter -> stored tensor with the same elements in the same order; rows for tokens may
            be more or fewer. Of tied parameters it is the first name, that of `named_parameters`.
        conversions: the parameters that transformers computes from other tensors, and those in MXFP4.
        buffers: persistent buffer -> stored tensor.
        resized: parameter -> its elements, if its stored tensor has fewer or more.
        tied: stored tensor -> the parameter that it is a second copy of.
        unused: stored tensors that the family leaves aside, such as layers that predict further tokens. An
            export carries them.
    """

    checkpoint: CheckpointDir
    parameters: Mapping[str, str] = field(repr=False)
    conversions: tuple[Conversion | Mxfp4Stack, ...] = field(repr=False)
    buffers: Mapping[str, str]
    resized: Mapping[str, int]
    tied: Mapping[str, str]
    unused: tuple[str, ...]

    def read_tensor(self, key: str, row: int | None = None) -> torch.Tensor:
        """One stored tensor in its stored type (of FP8: in fp32), or its element `row` along the first
        dimension."""
        entry = self.checkpoint.tensors[key]
        if entry.scales is not None:
            ((_, values),) = self.checkpoint.slices(key, entry.numel)
            return torch.from_numpy(values).reshape(entry.shape)
        shape = entry.shape if row is None else entry.shape[1:]
        raw = torch.from_numpy(self.checkpoint.read(key, row))
        return raw.view(STORED_DTYPES[entry.dtype]).reshape(shape)


def plan_source(model: Any, config: ModelConfig) -> LoadPlan:
    """`plan_load` of `config.path`, into a model that has the rows of `config.vocab_size`."""
    assert config.path is not None
    rows = None
    if config.vocab_size is not None:
        own = read_hf_config(replace(config, vocab_size=None))
        rows = own.get_text_config(decoder=True).vocab_size
    return plan_load(model, open_checkpoint(config.path), stored_rows=rows)


def plan_load(model: Any, checkpoint: CheckpointDir, *, stored_rows: int | None = None) -> LoadPlan:
    """Match a checkpoint with a meta model. Reads no weights, but for tied parameters that are stored twice.

    Args:
        stored_rows: of the stored embedding and output matrix; None: as many as the model has.

    Raises:
        ModelSourceError: a tensor of the model is missing or has another shape or no float type, a stored
            tensor belongs nowhere, or the checkpoint contradicts `tie_word_embeddings`; rows of tokens beside
            the model that would have to be resized.
    """
    names = resolve_names(model, checkpoint)
    wanted = model.state_dict(keep_vars=True)
    made = {**names.direct, **{name: c for c in names.conversions for name in c.targets}}
    stored_as = {  # parameter -> those of its names that the checkpoint holds
        first: [name for name in all_names if name in made] for first, *all_names in _tied_names(wanted)
    }
    buffers = {name for name, value in wanted.items() if not isinstance(value, torch.nn.Parameter)}
    # The family's own lists of names that may be absent (of buffers only: a parameter may not) or left over.
    allowed = SimpleNamespace(
        missing_keys=buffers - made.keys(), unexpected_keys=set(names.unexpected.values())
    )
    model._adjust_missing_and_unexpected_keys(allowed)
    missing = [name for name, found in stored_as.items() if not found] + sorted(allowed.missing_keys)
    left_over = [key for key, target in names.unexpected.items() if target in allowed.unexpected_keys]
    shapes = _stored_shapes(model, stored_rows)
    _refuse_mismatch(model, checkpoint, names, shapes, missing, left_over)
    _refuse_unresized(model, checkpoint, names, stored_rows)

    tied = {names.direct[alias]: name for name, found in stored_as.items() for alias in found[1:]}
    for alias, name in tied.items():
        _refuse_untied(checkpoint, names.direct[stored_as[name][0]], alias)
    parameters = {
        name: names.direct[found[0]] for name, found in stored_as.items() if found[0] in names.direct
    }
    return LoadPlan(
        checkpoint,
        parameters,
        names.conversions,
        {name: names.direct[name] for name in buffers & names.direct.keys()},
        {n: wanted[n].numel() for n in parameters if shapes[n] != tuple(wanted[n].shape)},
        tied,
        tuple(names.unexpected),
    )


def load_weights(
    plan: LoadPlan,
    units: Iterable[Unit],
    write: WriteRange,
    *,
    buffer_bytes: int = LOAD_BUFFER_BYTES,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Stream every parameter of `units` through `write(unit name, first element, fp32 values)`.

    Of a stack of experts, each expert's values go to its own unit. `units` may be some of the model's, with
    all experts of a stack or none.

    Args:
        buffer_bytes: bound of the memory that one slice takes. A parameter that is computed from several
            tensors takes those tensors (of stacked experts: those of one expert) besides.
        progress: called with the bytes of the fp32 values just written.

    Raises:
        ModelSourceError: a NaN or infinite weight, naming tensor, file and count.
        StorageError: a read failed.
    """
    tensors = plan.checkpoint.tensors
    destinations = _Destinations(units, write, progress)
    planned = {name: tensors[key].numel for name, key in plan.parameters.items()} | dict(plan.resized)
    planned |= {name: prod(shape) for c in plan.conversions for name, shape in c.targets.items()}
    wanted = destinations.numel()
    if odd := dict(wanted.items() - planned.items()):
        raise InvariantError(f"units and load plan differ in {some(sorted(odd))}")
    parameters = [(name, key) for name, key in plan.parameters.items() if name in wanted]
    for name, key in sorted(parameters, key=lambda item: (tensors[item[1]].file, tensors[item[1]].offset)):
        _load_tensor(plan.checkpoint, key, name, planned[name], destinations, buffer_bytes)
    for conversion in (c for c in plan.conversions if c.targets.keys() & wanted.keys()):
        for name, start, values in conversion.stream(plan.read_tensor):
            if nonfinite := _count_nonfinite(values):
                _refuse_nonfinite(
                    nonfinite, f"{name} (of {some(list(conversion.keys))})", tensors[conversion.keys[0]].file
                )
            destinations.write(name, start, values)


class _Destinations:
    """Where the elements of parameters go: to one unit, or of a stack, part by part, to several."""

    def __init__(
        self, units: Iterable[Unit], write: WriteRange, progress: Callable[[int], object]
    ) -> None:
        self._write, self._progress = write, progress
        found: dict[str, list[tuple[Unit, TensorSpec]]] = {}
        for unit in units:
            for spec in unit.tensors:
                found.setdefault(spec.name, []).append((unit, spec))
        self._places = {
            name: sorted(places, key=lambda place: place[1].part or 0) for name, places in found.items()
        }

    def numel(self) -> dict[str, int]:
        """Parameter -> its elements."""
        return {name: sum(spec.numel for _, spec in places) for name, places in self._places.items()}

    def write(self, name: str, start: int, values: NDArray[np.float32]) -> None:
        """Elements `[start, start + len(values))` of a parameter."""
        places, done = self._places.get(name, ()), 0
        if not places:  # made along with a parameter of these units
            return
        while done < values.size:
            part, inside = divmod(start + done, places[0][1].numel)  # parts are all of one size
            unit, spec = places[part]
            count = min(spec.numel - inside, values.size - done)
            self._write(unit.name, spec.offset + inside, values[done : done + count])
            done += count
        self._progress(4 * done)


def _load_tensor(
    checkpoint: CheckpointDir,
    key: str,
    name: str,
    numel: int,
    destinations: _Destinations,
    buffer_bytes: int,
) -> None:
    """Stream one stored tensor to the parameter `name` of `numel` elements. Its buffers end with this call.

    Rows that the parameter has not are left out. Rows that the tensor has not become the mean of its own:
    the logit of a new token is then the mean of the others', so what the model predicts changes little
    (Hewitt, Initializing New Word Embeddings for Pretrained Language Models, 2021).
    """
    entry = checkpoint.tensors[key]
    nonfinite = 0
    stored_bytes = max(1, entry.nbytes // max(1, entry.numel))
    row = entry.numel // entry.shape[0] if numel > entry.numel else 1
    per_slice = max(1, buffer_bytes // (stored_bytes + 4) // row) * row
    total = np.zeros(row, np.float64)
    for start, values in checkpoint.slices(key, per_slice):
        nonfinite += _count_nonfinite(values)
        destinations.write(name, start, values[: max(0, numel - start)])
        if numel > entry.numel:
            total += values.reshape(-1, row).sum(axis=0, dtype=np.float64)
    if nonfinite:
        _refuse_nonfinite(nonfinite, key, entry.file)
    for start in range(entry.numel, numel, row):
        destinations.write(name, start, (total / entry.shape[0]).astype(np.float32))


def _tied_names(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """For every parameter: its first name, and all its names (the first again): tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, value in wanted.items():
        if isinstance(value, torch.nn.Parameter):
            names.setdefault(id(value), []).append(name)
    for group in names.values():
        yield [group[0], *group]


def _stored_shapes(model: Any, rows: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters and buffers in a checkpoint whose embedding and output matrix have `rows` rows."""
    state = model.state_dict(keep_vars=True)
    ends = {id(p) for end in _ends(model) for p in end.parameters(recurse=False)}
    return {
        name: (rows, *value.shape[1:]) if rows is not None and id(value) in ends else tuple(value.shape)
        for name, value in state.items()
    }


def _ends(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def _refuse_unresized(
    model: Any, checkpoint: CheckpointDir, names: ResolvedNames, stored_rows: int | None
) -> None:
    """Layers that predict further tokens have heads of their own, which an export carries as they are."""
    if stored_rows is None or len(_ends(model)[0].weight) == stored_rows:
        return
    if beside := [key for key in names.unexpected if checkpoint.tensors[key].shape[:1] == (stored_rows,)]:
        raise ModelSourceError(
            f"model.vocab_size is not the {stored_rows} of {checkpoint.path}, which holds rows of tokens "
            f"beside the model: {some(beside)}; these are not resized: leave model.vocab_size out, or remove "
            "them from the weights"
        )


def _refuse_mismatch(
    model: Any,
    checkpoint: CheckpointDir,
    names: ResolvedNames,
    expected: Mapping[str, tuple[int, ...]],
    missing: list[str],
    left_over: list[str],
) -> None:
    """Raise one error that lists all tensors that do not fit. `expected`: name in the model -> shape."""
    wanted, tensors = model.state_dict(), checkpoint.tensors
    made = {name: (c.keys, shape) for c in names.conversions for name, shape in c.targets.items()}
    left_over += [f"{keys[0]} (as {name})" for name, (keys, _) in made.items() if name not in wanted]
    shapes = {name: (f"{key} is", tensors[key].shape) for name, key in names.direct.items()}
    shapes |= {name: (f"{some(list(keys), 1)} make", shape) for name, (keys, shape) in made.items()}
    reshaped = [
        f"{what} {list(shape)} where the model has {list(expected[name])}"
        for name, (what, shape) in shapes.items()
        if name in expected and shape != expected[name]
    ]
    read = [key for name, key in names.direct.items() if wanted[name].is_floating_point()]
    read += [key for c in names.conversions if isinstance(c, Conversion) for key in c.keys]
    empty = [key for key in read if not tensors[key].numel]
    retyped = [f"{key} is {tensors[key].dtype}" for key in read if not tensors[key].is_float]
    problems = [
        f"{len(found)} {what}: {some(found)}"
        for what, found in (
            ("missing", missing),
            ("not of this model", left_over),
            ("of another shape", reshaped),
            ("without elements", empty),
        )
        if found
    ]
    if retyped:
        problems.append(f"{len(retyped)} not of a float type (quantised?): {some(retyped)}")
    if not problems:
        return
    hint = "Does its config.json belong to these weights?"
    if missing and set(missing) <= set(model._tied_weights_keys or ()):
        hint = "If its output matrix is the embedding, set tie_word_embeddings to true in config.json."
    raise ModelSourceError(
        f"the tensors in {checkpoint.path} are not those of {type(model).__name__}: {'; '.join(problems)}. "
        f"{hint}"
    )


def _refuse_untied(checkpoint: CheckpointDir, key: str, alias: str) -> None:
    """Two stored tensors that the model ties (their shapes are the model's by now) must be equal."""
    pairs = zip(
        checkpoint.slices(key, COMPARE_ELEMENTS), checkpoint.slices(alias, COMPARE_ELEMENTS), strict=True
    )
    if all(np.array_equal(values, others) for (_, values), (_, others) in pairs):
        return
    raise ModelSourceError(
        f"{checkpoint.path} stores {key} and {alias} with different values, but its config.json says that "
        "they are one (tie_word_embeddings is true); set it to false to train both, or remove "
        f"{alias} from the weights"
    )


def _count_nonfinite(values: NDArray[np.float32]) -> int:
    """How many values are NaN or infinite. An fp64 sum, which finite fp32 cannot overflow, shows it."""
    with np.errstate(invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return 0
    return int(values.size - np.count_nonzero(np.isfinite(values)))


def _refuse_nonfinite(count: int, what: str, file: Path) -> NoReturn:
    raise ModelSourceError(
        f"{count} values of tensor {what} in {file} are NaN or infinite; the file is damaged or its training "
        "diverged"
    )
