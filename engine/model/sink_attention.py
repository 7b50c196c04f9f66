"""Attention with sinks (gpt-oss) on the flash kernels that torch ships, forward and backward.

A sink is a learnt logit `s` of each head that takes part in the softmax and has no value, so that a token may
attend to nothing (gpt-oss model card, arXiv 2508.10925; why models want it: StreamingLLM, arXiv 2309.17453).
With scores S, lse_i = log sum_j exp S_ij over the tokens that i sees, and L = logaddexp(lse, s):

    out_i = sum_j exp(S_ij - L_i) v_j = out_flash_i exp(lse_i - L_i)          ds = -sum_i exp(s - L_i) D_i

The sink is one more column of the softmax, P_is = exp(s - L_i), whose dP_is = dout_i . 0 vanishes. With it,
dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik) is P_ij (dout_i . v_j - D_i), or -P_is D_i; D_i = dout_i . out_i.

A flash backward (arXiv 2205.14135) rebuilds P = exp(S - lse) and D from the `lse` and `out` that it is given:
from L and the `out` above the stock kernel makes dq, dk, dv of the softmax with the sink, and nothing that is
kept is quadratic in the number of tokens. bf16 and fp16 on CUDA take these kernels; all else takes matrix
products, block after block. The flash backward adds in a fixed order where
`torch.use_deterministic_algorithms(True)` asks for it; the products always do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from tierstream.io.errors import ConfigError, InvariantError

#: Its name for transformers. Not "flash_...": for such, gpt-oss takes another kernel, and from the hub.
NAME = "sinks"
FLASH_HEAD_SIZE_MAX = 256
#: Queries whose scores the matrix products hold at once, for all heads and all keys that these queries see.
BLOCK = 128


def register() -> None:
    """Makes `attn_implementation="sinks"` known to transformers; models that use it are built later."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, sink_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def has_sinks(model: Any) -> bool:
    """Whether layers of a transformers model, on any device, have sinks, and masks that are causal, with or
    without a window. A family says the latter by supporting flash attention, which takes no others.
    """
    return model._supports_flash_attn and any(
        isinstance(getattr(module, "sinks", None), nn.Parameter) and module.is_causal
        for module in model.modules()
    )


@contextmanager
def without_sinks_kernel(config: Any) -> Iterator[None]:
    """Within, a model with this configuration attends in the plain way, which knows caches of keys."""
    if config._attn_implementation != NAME:
        yield
        return
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = NAME


def check_dropout(probability: float) -> None:
    """Raises ConfigError: attention has dropout."""
    if probability > 0:
        raise ConfigError(
            f"attention_dropout is {probability} in the model's config.json, and attention with sinks has no "
            "dropout; set it to 0 there, or use model.attention: eager"
        )


def no_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """For AttentionMaskInterface: without an entry there, transformers would drop a padding mask in silence.
    Raises InvariantError: a mask."""
    if attention_mask is not None:
        raise InvariantError(f"attention with sinks takes no mask, got one of {tuple(attention_mask.shape)}")


@torch.compiler.disable(reason="attention with sinks remembers the documents of a batch")
def sink_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float, dropout: float = 0.0, sliding_window: int | None = None, s_aux: Tensor | None = None,
    position_ids: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """For AttentionInterface: causal attention within documents, which begin where positions do not go on.

    Args:
        query: [rows, heads, tokens, head size]; heads are a multiple of those of `key` and `value`.
        sliding_window: tokens that a token sees, itself included; None: all before it.
        s_aux: the sinks [heads]; None in layers without.
        position_ids: int64 [rows or 1, tokens].

    Returns:
        [rows, tokens, heads, head size], and no weights.

    Raises:
        ConfigError: dropout.
        InvariantError: a mask, no positions, or keys from a cache.
    """
    check_dropout(dropout)
    no_mask(attention_mask=attention_mask)
    rows, heads, tokens, _size = query.shape
    if position_ids is None or key.shape[2] != tokens:
        raise InvariantError(
            f"attention with sinks needs whole rows and their position_ids, got {tokens} queries, "
            f"{key.shape[2]} keys, position_ids {None if position_ids is None else tuple(position_ids.shape)}"
        )
    sinks = query.new_full((heads,), -math.inf) if s_aux is None else s_aux
    packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    seen = Seen(documents_of(position_ids, rows), sliding_window)
    return SinkAttention.apply(*packed, sinks, seen, scaling).unflatten(0, (rows, tokens)), None


class Documents(NamedTuple):
    """Documents in rows that lie end to end: where each begins, and the number of tokens."""

    bounds: list[int]
    cu_seqlens: Tensor  # the same, int32 on the device
    longest: int


#: Tensor of positions -> part of it -> documents there. To find them is to wait for the device, so only the
#: first layer of a step does. Chunks of rows are views, made anew for each layer, of one tensor that stays.
_found = WeakTensorKeyDictionary()


def documents_of(positions: Tensor, rows: int) -> Documents:
    """The documents of int64 [rows or 1, tokens]."""
    found = _found.setdefault(positions if positions._base is None else positions._base, {})
    part = (rows, positions.storage_offset(), positions.shape, positions.stride(), positions._version)
    if part not in found:
        found[part] = _find_documents(positions.expand(rows, -1))
    return found[part]


def _find_documents(positions: Tensor) -> Documents:
    begins = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
    begins[:, 1:] = positions.diff(dim=1) != 1
    bounds = [*begins.flatten().cpu().nonzero().flatten().tolist(), begins.numel()]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=positions.device)
    return Documents(bounds, cu_seqlens, max(end - begin for begin, end in pairwise(bounds)))


class Seen(NamedTuple):
    """Which keys a query sees: those before it, in its document, in its window."""

    documents: Documents
    window: int | None

    def for_flash(self) -> tuple[tuple[Any, ...], dict[str, int | None]]:
        """Its arguments in the middle and at the end. No tokens to the right: that is causal, too."""
        ends, longest = self.documents.cu_seqlens, self.documents.longest
        left, right = (None, None) if self.window is None else (self.window - 1, 0)
        sides = {"window_size_left": left, "window_size_right": right}
        return (ends, ends, longest, longest, 0.0, self.window is None), sides

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Some queries, and the keys that any of them sees."""
        for begin, end in pairwise(self.documents.bounds):
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                first = begin if self.window is None else max(begin, start - self.window + 1)
                yield slice(start, stop), slice(first, stop)


class SinkAttention(torch.autograd.Function):
    """q [tokens, heads, size], k and v [tokens, kv heads, size], sinks [heads] -> out, as q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Seen, scale: float) -> Tensor:
        out, lse = (_flash_forward if _flash_takes(q, v) else _plain_forward)(q, k, v, seen, scale)
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = out.mul_((lse - total).exp_().t()[..., None]).to(q.dtype)
        ctx.seen, ctx.scale = seen, scale
        ctx.save_for_backward(q, k, v, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        backward = _flash_backward if _flash_takes(q, v) else _plain_backward
        dq, dk, dv = backward(grad.contiguous(), q, k, v, out, total, ctx.seen, ctx.scale)
        dots = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1).t()
        dsinks = -((sinks.to(total.dtype)[:, None] - total).exp_() * dots).sum(1)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None


def _flash_takes(q: Tensor, v: Tensor) -> bool:
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and q.shape[-1] == v.shape[-1] <= FLASH_HEAD_SIZE_MAX
        and q.shape[-1] % 8 == 0
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    keys, sides = seen.for_flash()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *keys, False, scale=scale, **sides)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    keys, sides = seen.for_flash()
    keys += (torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0))  # unused without dropout
    return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *keys, scale=scale, **sides)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, size] and lse [heads, tokens]; fp32, or fp64 if q is."""
    q, k, v = _wide(q, k), _wide(k), _wide(v)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[1:3], q.shape[0])
    for queries, keys in seen.blocks():
        scores = _scores(q, k, queries, keys, seen.window, scale)
        lse[..., queries] = scores.logsumexp(-1)
        shares = scores.sub_(lse[..., queries, None]).exp_()
        out[queries] = torch.einsum("hgqk,khd->qhgd", shares, v[keys])
    return out.flatten(1, 2), lse.flatten(0, 1)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, lse = q.dtype, lse.unflatten(0, (k.shape[1], -1))
    grad, out, q, k, v = _wide(grad, k), _wide(out, k), _wide(q, k), _wide(k), _wide(v)
    dots = (grad * out).sum(-1).movedim(0, -1)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in seen.blocks():
        shares = _scores(q, k, queries, keys, seen.window, scale).sub_(lse[..., queries, None]).exp_()
        dv[keys] += torch.einsum("hgqk,qhgd->khd", shares, grad[queries])
        dscores = torch.einsum("qhgd,khd->hgqk", grad[queries], v[keys])
        dscores = dscores.sub_(dots[..., queries, None]).mul_(shares).mul_(scale)
        dq[queries] = torch.einsum("hgqk,khd->qhgd", dscores, k[keys])
        dk[keys] += torch.einsum("hgqk,qhgd->khd", dscores, q[queries])
    return dq.flatten(1, 2).to(dtype), dk.to(dtype), dv.to(dtype)


def _wide(tensor: Tensor, grouped_by: Tensor | None = None) -> Tensor:
    """[tokens, heads, size] in fp32 or fp64; grouped: [tokens, kv heads, heads of a group, size]."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return tensor if grouped_by is None else tensor.unflatten(1, (grouped_by.shape[1], -1))


def _scores(q: Tensor, k: Tensor, queries: slice, keys: slice, window: int | None, scale: float) -> Tensor:
    """[kv heads, heads of a group, queries, keys]; -inf where a query does not see a key."""
    scores = torch.einsum("qhgd,khd->hgqk", q[queries], k[keys]).mul_(scale)
    numbers = torch.arange(keys.start, queries.stop, device=q.device)
    distance = numbers[queries.start - keys.start :, None] - numbers
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return scores.masked_fill_(hidden, -math.inf)
