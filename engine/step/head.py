"""Final norm, output matrix and loss, in chunks of tokens: forward and backward at once.

The loss is the cross-entropy and, where it is asked for, a multiple of the z-loss: the mean of
logsumexp(logits)^2, which keeps the softmax's normaliser near 1 (PaLM, arXiv 2204.02311, section 5).

The number of trained tokens of the step is known beforehand, so the loss of a chunk can be differentiated as
soon as it is computed, and logits exist for one chunk only: never vocabulary x tokens in memory. Nothing of
the head is recomputed.

At its peak a chunk holds three fp32 values per logit (log-softmax, and two gradients of it), with the z-loss
five, or, with a loss kernel that works in place, the logit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tierstream.engine.model.anatomy import without_router_logits
from tierstream.engine.model.binding import Binding
from tierstream.engine.model.decoder import decoder_of
from tierstream.engine.model.units import Anatomy
from tierstream.engine.plan_tiers import logit_nbytes

#: Label of a position that is not trained on.
IGNORED = -100

#: `kernel(logits, targets, trained_tokens, z_coef)`: losses; see `liger_cross_entropy_`.
LossKernel = Callable[[torch.Tensor, torch.Tensor, int, float], torch.Tensor]
#: Tensor that is differentiated -> what its gradient is added to.
Sums = dict[torch.Tensor, torch.Tensor]


class Head:
    """The loss of a step and its gradient with respect to the last hidden states.

    Args:
        norm: the decoder's final norm; its `forward` of now is what runs.
        output: gives logits [tokens, vocabulary] of normed hidden states. With an attribute `loss_kernel`, a
            LossKernel, it is a linear layer without bias, and the kernel is used.
        binding: places of the head unit's tensors in both.
        chunk_tokens: tokens whose logits exist at once.
        z_coef: what the z-loss is multiplied with; 0: it is not computed.
    """

    def __init__(
        self, norm: nn.Module, output: Any, binding: Binding, chunk_tokens: int, z_coef: float = 0.0
    ) -> None:
        self._norm, self._z_coef = norm.forward, z_coef
        self._output, self._binding, self._chunk_tokens = output, binding, chunk_tokens
        self._loss_kernel: LossKernel | None = getattr(output, "loss_kernel", None)

    def loss_and_gradient(
        self,
        weights: list[torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        trained_tokens: int,
        gradients: Sequence[torch.Tensor | None],
        *,
        of_hidden: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The losses, summed over trained tokens and divided once by their number.

        Args:
            weights: the head unit's tensors.
            hidden: [rows, seq_len, hidden_size], before the final norm.
            labels: int64 [rows, seq_len], already shifted; IGNORED where nothing is trained.
            trained_tokens: labels of the step that are not IGNORED; > 0.
            gradients: fp32 accumulators, one per tensor; added to. None: it is frozen, or not of the head.
            of_hidden: that gradient is wanted.

        Returns:
            (fp64 [2], cross-entropy and z-loss without its coefficient, 0 if that is 0; the gradient of
            their weighted sum with respect to `hidden`, in its shape and dtype).
        """
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        grad_hidden = torch.empty_like(flat) if of_hidden else None
        total = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        leaves, sums = list(weights), Sums()
        for index in self._binding.used:
            if (own := gradients[index]) is not None:
                leaves[index] = weights[index].detach().requires_grad_()
                sums[leaves[index]] = own
        run_chunk = self._plain_chunk if self._loss_kernel is None else self._fused_chunk
        with torch.enable_grad(), self._binding.bound(leaves):
            for rows in self._chunks(flat):
                part = flat[rows].detach().requires_grad_(of_hidden)
                losses, grad_part = run_chunk(part, targets[rows], trained_tokens, sums)
                total += losses
                if grad_hidden is not None and grad_part is not None:
                    grad_hidden[rows] = grad_part
        return total, None if grad_hidden is None else grad_hidden.view(hidden.shape)

    def cross_entropy(
        self, weights: list[torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The cross-entropy summed over trained tokens, 0-dim fp64; without a graph. Arguments as above."""
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad(), self._binding.bound(weights):
            for rows in self._chunks(flat):
                logits = self._output(self._norm(flat[rows]))
                if self._loss_kernel is None:
                    total += F.cross_entropy(
                        logits.float(), targets[rows], ignore_index=IGNORED, reduction="sum"
                    )
                else:
                    total += self._loss_kernel(logits, targets[rows], 1, 0.0)[0].sum(dtype=torch.float64)
        return total

    def logits(self, weights: list[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, vocabulary] of `hidden` [tokens, hidden_size], without a graph."""
        with torch.no_grad(), self._binding.bound(weights):
            logits: torch.Tensor = self._output(self._norm(hidden)).float()
        return logits

    def _chunks(self, flat: torch.Tensor) -> Iterator[slice]:
        return (slice(i, i + self._chunk_tokens) for i in range(0, flat.shape[0], self._chunk_tokens))

    def _plain_chunk(
        self, part: torch.Tensor, targets: torch.Tensor, trained_tokens: int, sums: Sums
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # No name for the logits: they are gone before the gradient is taken.
        losses = self._summed(self._output(self._norm(part)).float(), targets)
        objective = losses[0] + self._z_coef * losses[1] if self._z_coef else losses[0]
        grad_part = _differentiate(objective / trained_tokens, part, sums)
        return torch.stack(losses).detach().double() / trained_tokens, grad_part

    def _summed(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy and z-loss over trained tokens, 0-dim each. `logits`: fp32 [tokens, vocabulary]."""
        cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        if not self._z_coef:
            return cross_entropy, torch.zeros_like(cross_entropy)
        return cross_entropy, logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0.0).sum()

    def _fused_chunk(
        self, part: torch.Tensor, targets: torch.Tensor, trained_tokens: int, sums: Sums
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._loss_kernel is not None
        weight = self._output.weight
        normed = self._norm(part)
        with torch.no_grad():
            logits = normed @ weight.T
            losses = self._loss_kernel(logits, targets, trained_tokens, self._z_coef)
            grad_logits = logits  # overwritten in place
            if weight in sums:
                _add_product(sums[weight], grad_logits.T, normed)
            grad_normed = grad_logits @ weight if normed.requires_grad else None
        of_norm = {leaf: total for leaf, total in sums.items() if leaf is not weight}
        return losses.sum(-1, dtype=torch.float64), _differentiate(normed, part, of_norm, grad_normed)


def _differentiate(
    value: torch.Tensor, part: torch.Tensor, sums: Sums, grad: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Adds what there is of gradients to `sums`; returns that of `part`, if it requires one."""
    wanted = [part] if part.requires_grad else []
    if not (wanted or sums):
        return None
    grads = list(torch.autograd.grad(value, [*wanted, *sums], grad))
    grad_part = grads.pop(0) if wanted else None
    for total, own in zip(sums.values(), grads, strict=True):
        total.add_(own)
    return grad_part


def logits_nbytes(output: Any, tokens: int, z_coef: float) -> int:
    """What a chunk of so many tokens takes at its peak, beside weights and sums: its logits and what is made
    of them. `output`, `z_coef`: those of a `Head`.
    """
    fused = getattr(output, "loss_kernel", None) is not None
    per_logit = logit_nbytes(z_coef, output.weight.element_size() if fused else None)
    return int(tokens * output.weight.shape[0] * per_logit)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b`; where the device has such a product, it is never rounded to the type of `a`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


class ModelLogits:
    """Logits as the model's own forward makes them of what its decoder gives: scaled, capped, or else.

    Args:
        decoder_output: class of what the decoder returns.
    """

    def __init__(self, model: Any, decoder_output: type) -> None:
        self._model, self._output = model, decoder_output

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] of `normed` [tokens, hidden_size]."""
        decoder = decoder_of(self._model)
        ids = torch.zeros(1, len(normed), dtype=torch.int64, device=normed.device)
        decoded = self._output(last_hidden_state=normed.unsqueeze(0))
        decoder.forward = lambda *args, **kwargs: decoded
        try:
            output = self._model.forward(
                input_ids=ids, use_cache=False, **without_router_logits(self._model.config)
            )
        finally:
            del decoder.forward
        logits: torch.Tensor = output.logits.squeeze(0)
        return logits


def model_logits(model: Any, anatomy: Anatomy) -> Any:
    """What `Head` makes logits with: the output matrix itself, where they are no more than its product."""
    output = model.get_output_embeddings()
    return output if anatomy.plain_logits else ModelLogits(model, anatomy.decoder_output)


def final_norm(model: Any, anatomy: Anatomy) -> nn.Module:
    """The module that ends the decoder; one that does nothing, where there is none."""
    norm: nn.Module = nn.Identity() if anatomy.norm is None else model.get_submodule(anatomy.norm)
    return norm
