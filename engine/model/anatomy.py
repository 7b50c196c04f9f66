"""What a model's own forward does around its layers, found by running it: on `meta`, with layers that hand
their input on. That takes neither memory nor weights, so a model that cannot be streamed is refused before
anything is read.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tierstream.engine.model.lookups import Lookups, check_lookup
from tierstream.io.errors import ModelSourceError

#: `model_type` of the families whose losses and gradients the tests compare with those of transformers.
COMPARED = frozenset({
    "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4_moe", "gpt_oss",
    "llama", "mistral", "mixtral", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next",
})  # fmt: skip
#: Of the runs: one with so many rows, one with a row more.
_ROWS, _TOKENS = 2, 3


@dataclass(frozen=True)
class Anatomy:
    """How a decoder is put together; modules by their names.

    Attributes:
        tables: those beside the layers that look rows up, the input embedding first.
        norm: the one whose output is the decoder's; None: there is none.
        decoder_output: class of what the decoder returns.
        plain_logits: the logits are what the output matrix gives, and nothing is done to them.
        rows_dim: dimension of the layers' input in which the rows lie; None: rows cannot run apart.
        boundary_width: elements of the layers' input per token.
    """

    tables: tuple[str, ...]
    norm: str | None
    decoder_output: type
    plain_logits: bool
    rows_dim: int | None
    boundary_width: int


def find_anatomy(model: Any) -> Anatomy:
    """Of a causal language model as transformers' classes have it: forwards that were put into instances do
    not run.

    Raises:
        ModelSourceError: it cannot be streamed.
    """
    one, more = _Run(model, _ROWS), _Run(model, _ROWS + 1)
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
    )


def comparison_warning(model_type: str) -> str | None:
    """What to know of a model that can be streamed by its structure, but that nobody has compared."""
    if model_type in COMPARED:
        return None
    return (
        f"models of type {model_type} can be streamed as they are built, but their losses and gradients were "
        "never compared with those of transformers: compare a short run before you trust a long one"
    )


def without_router_logits(config: Any) -> dict[str, bool]:
    """What a decoder is told so that transformers does not keep those of all layers."""
    return {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}


class _Run:
    """One run of a model over rows of a few tokens.

    Attributes:
        boundary: shape of the layers' input.
        extras: shapes of what else layers have gradients for.
    """

    def __init__(self, model: Any, rows: int) -> None:
        self._model = model = self._stand_in(model)
        decoder = model.get_decoder()
        self._owners = {  # of a tied matrix the first
            id(parameter): name
            for name, module in reversed(_beside_layers(model))
            for parameter in module.parameters(recurse=False)
        }
        self.tables: list[str] = []
        self.boundary, self.extras = torch.Size(), list[torch.Size]()
        self._called = list[int]()
        given = dict[str, Any]()
        for name, module in _beside_layers(model):
            vars(module).pop("forward", None)
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_()  # what is frozen changes nothing of the anatomy
            module.register_forward_hook(lambda _, __, output, name=name: given.update({name: output}))
        ids = torch.zeros(rows, _TOKENS, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with Lookups(self._look_up), _Answers():
                output = model.forward(input_ids=ids, use_cache=False, **without_router_logits(model.config))
        except ModelSourceError:
            raise
        except Exception as error:  # whatever the code of a family does where values decide
            raise self._error(f"does not run on meta ({' '.join(str(error).split())[:200]})") from error
        if self._called != list(range(len(decoder.layers))):
            raise self._error("does not call its layers once each, one after another")
        owning = (name for name, module in _beside_layers(model) if module._parameters)
        if unused := [name for name in owning if name not in given]:
            raise self._error(f"does nothing with {len(unused)} of its modules over tokens ({unused[0]})")
        decoded = given[_name(model, decoder)]
        self.decoder_output = type(decoded)
        self.norm = next((name for name, made in given.items() if made is decoded.last_hidden_state), None)
        self.plain_logits = output.logits is given.get(_name(model, model.get_output_embeddings()))

    def _stand_in(self, model: Any) -> Any:
        """A copy that may be changed: of the layers no more than what can be asked of them."""
        layers = [copy.copy(layer) for layer in model.get_decoder().layers]
        for index, layer in enumerate(layers):
            layer.forward = partial(self._layer, index)
        return copy.deepcopy(model, {id(model.get_decoder().layers): nn.ModuleList(layers)})

    def _layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
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
        return hidden

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
    inside = {id(module) for layer in model.get_decoder().layers for module in layer.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def _rows_dim(one: _Run, more: _Run) -> int | None:
    """None also where another tensor that layers have a gradient for has its rows not in front."""
    changed = [dim for dim, (a, b) in enumerate(zip(one.boundary, more.boundary, strict=True)) if a != b]
    cut = all(a[:1] != b[:1] for a, b in zip(one.extras, more.extras, strict=True))
    return changed[0] if len(changed) == 1 and cut else None


def _name(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
