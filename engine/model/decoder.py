"""The decoder inside a causal language model, and its layers, whatever a family calls them."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_of(model: Any) -> Any:
    """What transformers' own accessor says, where that has layers and is not the whole model; else the part
    of the model that has them.
    """
    given = model.get_decoder()
    candidates = (given, model.base_model, *model.children())
    return next((own for own in candidates if own is not model and _layers(own, model)), given)


def layers_of(model: Any) -> Any:
    """The decoder's nn.ModuleList `layers`, or the only one in it of as many modules; empty: it has none."""
    return _layers(decoder_of(model), model) or nn.ModuleList()


def _layers(decoder: Any, model: Any) -> nn.ModuleList | None:
    named = getattr(decoder, "layers", None)
    if isinstance(named, nn.ModuleList):
        return named
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = (own for own in decoder.modules() if isinstance(own, nn.ModuleList))
    found = [own for own in lists if len(own) == depth]
    return found[0] if len(found) == 1 else None
