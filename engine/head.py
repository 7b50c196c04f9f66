"""Final norm, output matrix and cross-entropy, in chunks of tokens: forward and backward at once.

The number of trained tokens of the step is known beforehand, so the loss of a chunk can be differentiated as
soon as it is computed, and logits exist for one chunk only: never vocabulary x tokens in memory. Nothing of
the head is recomputed.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tierstream.engine.binding import Binding

#: Label of a position that is not trained on.
IGNORED = -100


class Head:
    """The loss of a step and its gradient with respect to the last hidden states.

    Args:
        norm: the decoder's final norm. output: the module that gives logits.
        binding: places of the head unit's tensors in both.
        chunk_tokens: tokens whose logits exist at once.
    """

    def __init__(self, norm: nn.Module, output: nn.Module, binding: Binding, chunk_tokens: int) -> None:
        # The unbound forward of the class: the instance's own was replaced by the identity (see Sweep).
        self._norm = type(norm).forward.__get__(norm)
        self._output, self._binding, self._chunk_tokens = output, binding, chunk_tokens

    def loss_and_gradient(
        self,
        weights: list[torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        trained_tokens: int,
        gradients: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy summed over trained tokens and divided once by their number.

        Args:
            weights: the head unit's tensors.
            hidden: [rows, seq_len, hidden_size], before the final norm.
            labels: int64 [rows, seq_len], already shifted; IGNORED where nothing is trained.
            trained_tokens: labels of the step that are not IGNORED; > 0.
            gradients: fp32 accumulators, one per tensor of the unit; added to.

        Returns:
            (loss, 0-dim fp64; d loss / d hidden, in the shape and dtype of `hidden`).
        """
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        grad_hidden = torch.empty_like(flat)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        used = self._binding.used
        leaves = list(weights)
        for index in used:
            leaves[index] = weights[index].detach().requires_grad_()
        with torch.enable_grad(), self._binding.bound(leaves):
            for start in range(0, flat.shape[0], self._chunk_tokens):
                rows = slice(start, start + self._chunk_tokens)
                part = flat[rows].detach().requires_grad_()
                logits = self._output(self._norm(part)).float()
                summed = F.cross_entropy(logits, targets[rows], ignore_index=IGNORED, reduction="sum")
                grads = torch.autograd.grad(summed / trained_tokens, [part, *(leaves[i] for i in used)])
                total += summed.detach()
                grad_hidden[rows] = grads[0]
                for index, grad in zip(used, grads[1:], strict=True):
                    gradients[index].add_(grad)
        return total / trained_tokens, grad_hidden.view(hidden.shape)
