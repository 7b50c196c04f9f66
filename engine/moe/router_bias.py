"""Correction biases of routers, moved towards equal load after each step.

The bias is added to an expert's score when experts are chosen, and to nothing else; no gradient reaches it.
After a step it grows by a fixed amount where an expert had fewer tokens than the mean, and shrinks where it
had more (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Loads are those of the whole step,
counted as integers: the result is the same to the bit wherever they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tierstream.engine.model.carve import experts_of
from tierstream.engine.model.decoder import layers_of
from tierstream.engine.moe.router_loss import count_choices
from tierstream.io.errors import ConfigError

_NAME = "e_score_correction_bias"


def biases_of(model: Any) -> dict[str, torch.Tensor]:
    """Correction biases that belong to a model's weights but are no parameters, by name."""
    parameters = dict(model.named_parameters())
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name.rpartition(".")[2] == _NAME and name not in parameters
    }


def saved_biases(model: Any) -> dict[str, list[float]]:
    """For a checkpoint: fp32 values are the same to the bit as JSON numbers."""
    return {name: bias.tolist() for name, bias in biases_of(model).items()}


def restore_biases(model: Any, saved: Mapping[str, list[float]]) -> None:
    """What `saved_biases` gave, into a model whose buffers have memory."""
    for name, bias in biases_of(model).items():
        bias.copy_(torch.tensor(saved[name]))


def check_bias_update(model: Any, rate: float) -> None:
    """Raises ConfigError if biases shall move that the model does not have in fp32."""
    if rate and not _routed(model):
        raise ConfigError(
            f"moe.bias_update_rate is {rate}, but the routers of {type(model).__name__} have no fp32 buffer "
            f"{_NAME}; set it to 0"
        )


class BiasUpdate:
    """Counts the load of every expert as layers run, and moves the biases when the step has been judged.

    Args:
        rate: what a bias moves by in a step; 0: nothing is counted or moved.

    Raises:
        ConfigError: see `check_bias_update`.
    """

    def __init__(self, model: Any, rate: float) -> None:
        check_bias_update(model, rate)
        self._rate = rate
        self._loads = [_Load(*pair) for pair in _routed(model)] if rate else []

    def begin_step(self, padding: torch.Tensor | None) -> None:
        """Args: padding: bool [rows, seq_len]; None: there is none."""
        kept = None if padding is None else ~padding.reshape(-1)
        for load in self._loads:
            load.begin_step(kept)

    def apply(self) -> None:
        """The step's update is applied."""
        for load in self._loads:
            load.move_bias(self._rate)


class _Load:
    """Tokens of the step that have gone to each expert of one layer.

    What changes while layers run are tensors: compiled layers need not be compiled again for it.
    """

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        self._router = router
        experts.register_forward_pre_hook(self._count)

    def begin_step(self, kept: torch.Tensor | None) -> None:
        self._kept = kept
        self._tokens = torch.zeros_like(self._router.get_buffer(_NAME), dtype=torch.int64)
        self._seen = torch.zeros_like(self._tokens[0])

    def move_bias(self, rate: float) -> None:
        bias, tokens = self._router.get_buffer(_NAME), self._tokens
        bias.add_(torch.sign(tokens.sum() - tokens * tokens.numel()).to(bias.dtype), alpha=rate)

    def _count(self, experts: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            return  # the recompute: counted already
        index, kept = args[1], None
        if self._kept is not None:
            kept = self._kept[self._seen + torch.arange(len(index), device=index.device)]
        self._tokens += count_choices(index, self._tokens.numel(), kept)
        self._seen += len(index)


def _routed(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Of each layer that has both: the router whose bias can be moved, and the experts."""
    pairs = []
    for layer in layers_of(model):
        experts = experts_of(layer)
        for module in layer.modules():
            bias = module._buffers.get(_NAME)
            stored = bias is not None and _NAME not in module._non_persistent_buffers_set
            if experts is not None and stored and bias.dtype == torch.float32:
                pairs.append((module, experts))
    return pairs
