"""What a loss kernel does, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def torch_cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, trained_tokens: int) -> torch.Tensor:
    """As `tierstream.engine.kernels.liger_cross_entropy_`."""
    leaf = logits.float().requires_grad_()
    with torch.enable_grad():
        losses = F.cross_entropy(leaf, targets, ignore_index=-100, reduction="none") / trained_tokens
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    logits.copy_(gradient)
    return losses.detach()
