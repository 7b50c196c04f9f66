"""What a model's own forward does around its layers, found by running it: on `meta`, with layers that hand
their input on. That takes neither memory nor weights, so a model that cannot be streamed is refused before
anything is read.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tierstream.engine.model.decoder import decoder_of, layers_of
from tierstream.engine.model.lookups import Lookups, check_lookup
from tierstream.engine.model.units import Anatomy
from tierstream.io.errors import ModelSourceError

#: Of the runs: one with so many rows, one with a row more.
_ROWS, _TOKENS = 2, 3


def find_anatomy(model: Any) -> Anatomy:
    """Of a causal language model as transformers' classes have it: forwards that were put into instances do
    not run.

    Raises:
        ModelSourceError: it cannot be streamed.
    """
    one = _run(model)
    more = _Run(model, _ROWS + 1, one.tuple_of)
    embedding = _name(model, model.get_input_embeddings())
    if embedding not in one.tables:
        raise ModelSourceError(
            f"{type(model).__name__}: {embedding} does not look rows of its one matrix up; this model cannot "
            "be streamed"
        )
    return Anatomy(
        tables=(embedding, *(name for name in one.tables if name != embedding)),
        norm=one.norm,
        decoder_output=one.decoder_output,
        plain_logits=one.plain_logits,
        rows_dim=_rows_dim(one, more),
        boundary_width=one.boundary.numel() // (_ROWS * _TOKENS),
        tuple_of=one.tuple_of,
        extras_width=sum(shape.numel() for shape in one.extras) // (_ROWS * _TOKENS),
    )


def _run(model: Any) -> _Run:
    """The first that succeeds of what layers may return."""
    errors = []
    for tuple_of in (None, 1, 2, 3):
        try:
            return _Run(model, _ROWS, tuple_of)
        except ModelSourceError as error:
            errors.append(error)
    raise errors[0]


def without_router_logits(config: Any) -> dict[str, bool]:
    """What a decoder is told so that transformers does not keep those of all layers."""
    return {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}


class _Run:
    """One run of a model over rows of a few tokens.

    Attributes:
        boundary: shape of the layers' input.
        extras: shapes of what else layers have gradients for.
        tuple_of: that of the anatomy.
    """

    def __init__(self, model: Any, rows: int, tuple_of: int | None) -> None:
        self.tuple_of = tuple_of
        self._model = model = self._stand_in(model)
        decoder = decoder_of(model)
        self._owners = {  # of a tied matrix the first
            id(parameter): name
            for name, module in reversed(_beside_layers(model))
            for parameter in module.parameters(recurse=False)
        }
        self.tables: list[str] = []
        self.boundary, self.extras = torch.Size(), list[torch.Size]()
        self._called, self._shared = list[int](), list[MutableMapping[Any, Any]]()
        taken, given, calls = dict[str, Any](), dict[str, Any](), Counter[str]()

        def note(_: Any, inputs: tuple[Any, ...], output: Any, *, name: str) -> None:
            taken[name], given[name] = next(iter(inputs), None), output
            calls[name] += 1

        for name, module in _beside_layers(model):
            vars(module).pop("forward", None)
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_()  # what is frozen changes nothing of the anatomy
            module.register_forward_hook(partial(note, name=name))
        ids = torch.zeros(rows, _TOKENS, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with Lookups(self._look_up), _Answers():
                output = model.forward(input_ids=ids, use_cache=False, **without_router_logits(model.config))
        except ModelSourceError:
            raise
        except Exception as error:  # whatever the code of a family does where values decide
            raise self._error(f"does not run on meta ({' '.join(str(error).split())[:200]})") from error
        self.extras += [tensor.shape for tensor in self._handed_on()]
        if self._called != list(range(len(layers_of(model)))):
            raise self._error("does not call its layers once each, one after another")
        owning = [name for name, module in _beside_layers(model) if module._parameters]
        if unused := [name for name in owning if name not in given]:
            raise self._error(f"does nothing with {len(unused)} of its modules over tokens ({unused[0]})")
        decoded = given[_name(model, decoder)]
        self.decoder_output = type(decoded)
        last = decoded.last_hidden_state
        # One that norms something else too has to stay where it is.
        self.norm = next((name for name, made in given.items() if made is last and calls[name] == 1), None)
        head, inside = _name(model, model.get_output_embeddings()), f"{_name(model, decoder)}."
        if after := [name for name in owning if not name.startswith(inside) and name != head]:
            raise self._error(f"has weights ({after[0]}) between its decoder and its output matrix")
        self.plain_logits = output.logits is given.get(head) and _origin(taken[head]) is _origin(last)

    def _stand_in(self, model: Any) -> Any:
        """A copy that may be changed: of the layers no more than what can be asked of them."""
        layers = [copy.copy(layer) for layer in layers_of(model)]
        for index, layer in enumerate(layers):
            layer.forward = partial(self._layer, index, partial(type(layer).forward, layer))
        return copy.deepcopy(model, {id(layers_of(model)): nn.ModuleList(layers)})

    def _layer(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, *others = args or (kwargs["hidden_states"],)
        if not isinstance(hidden, torch.Tensor) or (self._called and hidden.shape != self.boundary):
            raise self._error("does not hand what a layer returns on to the next one as it is")
        self._called.append(index)
        self.boundary = hidden.shape
        self.extras += [
            tensor.shape
            for tensor in (*others, *kwargs.values())
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor is not hidden
        ]
        if shared := [value for value in kwargs.values() if isinstance(value, MutableMapping)]:
            # What layers hand on in a mapping, they alone know. Attention does so, before experts, which
            # may not run on meta.
            with suppress(Exception):
                forward(*args, **kwargs)
            self._shared += [mapping for mapping in shared if all(mapping is not own for own in self._shared)]
        return hidden if self.tuple_of is None else (hidden, *[None] * (self.tuple_of - 1))

    def _handed_on(self) -> list[torch.Tensor]:
        """In mappings, from layers to later ones."""
        leaves = tree_leaves([dict(mapping) for mapping in self._shared])
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _look_up(self, ids: torch.Tensor, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self._owners.get(id(matrix))
        if name is not None and len(list(self._model.get_submodule(name).parameters())) == 1:
            check_lookup(f"{type(self._model).__name__}: {name}", *args, **kwargs)
            if name in self.tables:
                raise self._error(f"looks rows of {name} up more than once")
            self.tables.append(name)
        return F.embedding(ids, matrix, *args, **kwargs)

    def _error(self, what: str) -> ModelSourceError:
        return ModelSourceError(f"{type(self._model).__name__} {what}; this model cannot be streamed")


class _Answers(TorchFunctionMode):
    """Within, a condition on tensors of `meta` is true: of those that transformers asks for, all shorten the
    making of masks.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__bool__, torch.Tensor.item) and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def _beside_layers(model: Any) -> list[tuple[str, nn.Module]]:
    inside = {id(module) for layer in layers_of(model) for module in layer.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def _rows_dim(one: _Run, more: _Run) -> int | None:
    """None also where another tensor that layers have a gradient for has its rows not in front."""
    changed = [dim for dim, (a, b) in enumerate(zip(one.boundary, more.boundary, strict=True)) if a != b]
    cut = all(a[:1] != b[:1] for a, b in zip(one.extras, more.extras, strict=True))
    return changed[0] if len(changed) == 1 and cut else None


def _origin(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _name(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
