"""The same model trained in the plain way, all of it on the device: what streaming is judged against.

Weights and gradients in the compute dtype, `torch.utils.checkpoint` around every decoder layer, the same
chunked loss; no optimizer. It is an upper limit: nothing moves, and nothing is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierstream.engine.config import RunConfig
from tierstream.engine.model.binding import Binding
from tierstream.engine.model.build import build_model
from tierstream.engine.model.carve import TORCH_DTYPES, units_of_run
from tierstream.engine.model.decoder import decoder_of, layers_of
from tierstream.engine.model.meta_model import materialise_buffers
from tierstream.engine.step.batch import Batch
from tierstream.engine.step.head import Head, final_norm, model_logits

#: `read(unit, plane, first element, out)`: fills `out` from a plane (`Store.read_range`).
ReadRange = Callable[[str, str, int, NDArray[Any]], None]
_BIT_TYPES = {"bfloat16": np.uint16, "float32": np.float32}


class ResidentModel:
    """Forward and backward of a whole model that lies on the device; all rows of a step run at once.

    Args:
        config: its model, kernels and chunks of the loss.
        read: where the weights come from; called now, one tensor at a time.
        parts: see `build_model`.
    """

    def __init__(
        self,
        config: RunConfig,
        read: ReadRange,
        device: torch.device,
        parts: ExitStack,
    ) -> None:
        model, hf_config = build_model(config, parts)
        units = units_of_run(model, config.moe, config.optimizer)
        self._parameters = {
            name: nn.Parameter(torch.empty_like(meta, device=device), requires_grad=meta.requires_grad)
            for name, meta in model.named_parameters()
        }
        self._gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                # Autograd adds in place to a gradient that is there.
                self._gradients[name] = parameter.grad = torch.zeros_like(parameter)
        for unit in units.in_forward_order:
            for tensor in unit.tensors:
                bits = np.empty(tensor.numel, _BIT_TYPES[unit.dtype])
                read(unit.name, "weight", tensor.offset, bits)
                values = torch.from_numpy(bits).view(TORCH_DTYPES[unit.dtype]).view(tensor.shape)
                place = self._parameters[tensor.name].detach()
                (place if tensor.part is None else place[tensor.part]).copy_(values)
        replace_parameters(model, self._parameters)
        materialise_buffers(model, None, device)
        self._decoder = decoder_of(model)
        for layer in layers_of(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        norm = final_norm(model, units.anatomy)
        ends = (units.head, *units.beside_head)
        binding = Binding(model, [norm, model.get_output_embeddings()], *ends)
        chunk_tokens = config.train.loss_chunk(hf_config.vocab_size)
        logits = model_logits(model, units.anatomy)
        self._head = Head(norm, logits, binding, chunk_tokens, config.train.z_loss_coef)
        norm.forward = lambda hidden: hidden  # computed by the head, in chunks, together with the loss
        self._head_names = [tensor.name for unit in ends for tensor in unit.tensors]

    def step(self, batch: Batch) -> float:
        """Forward and backward; returns the mean cross-entropy over the trained tokens when all of it is
        done.
        """
        for gradient in self._gradients.values():
            gradient.zero_()
        hidden = self._decoder(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        with torch.no_grad():
            losses, grad = self._head.loss_and_gradient(
                [self._parameters[name].detach() for name in self._head_names],
                hidden.detach(),
                batch.labels,
                batch.trained_tokens,
                [self._gradients.get(name) for name in self._head_names],
                of_hidden=hidden.requires_grad,
            )
        if grad is not None:
            torch.autograd.backward(hidden, grad)
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        return losses[0].item()

    def grad_norm(self) -> float:
        """Global L2 norm of the last step's gradients, in fp64."""
        gradients = self._gradients.values()
        return math.hypot(*(torch.linalg.vector_norm(g, dtype=torch.float64).item() for g in gradients))


def replace_parameters(model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Puts them in the place of the model's own of the same names, tied ones everywhere."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = parameters[names[id(parameter)]]
