"""What a loss kernel does, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def torch_cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, trained_tokens: int, z_coef: float
) -> torch.Tensor:
    """As `tierstream.engine.model.kernels.liger_cross_entropy_`."""
    leaf = logits.float().requires_grad_()
    with torch.enable_grad():
        losses = F.cross_entropy(leaf, targets, ignore_index=-100, reduction="none") / trained_tokens
        squares = leaf.logsumexp(-1).square() * (targets != -100) / trained_tokens
        (gradient,) = torch.autograd.grad((losses + z_coef * squares).sum(), leaf)
    logits.copy_(gradient)
    return torch.stack([losses, squares if z_coef else torch.zeros_like(squares)]).detach()
