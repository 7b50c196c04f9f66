"""Bytes that the backward of a layer takes at its peak, beside the buffers of the run.

Estimated from the shapes of parameters, for all families alike: what transformers' modules and Liger's keep
for their backward (Korthikanti et al., arXiv 2205.05198, count so), and what is made of it while
the largest products are differentiated. Attention is counted as a flash kernel, without a matrix of scores;
experts as evenly used. tests/engine/planner/test_activations.py compares with what steps allocate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierstream.engine.config import RunConfig
from tierstream.engine.device.memory import group_rows
from tierstream.engine.model.units import ModelUnits
from tierstream.engine.plan_tiers import logit_nbytes
from tierstream.engine.planner.case import Case
from tierstream.tiered.layout import ITEM_BYTES, TensorSpec

#: Tensors as large as the input of a layer, of all rows: the decoder's output and its gradient, and the
#: gradient of a layer's output; where rows are in chunks, that of its input, too. And of the rows of a chunk:
#: its output, and the gradient of its input where there are several.
_OF_ALL_ROWS, _OF_CHUNK = 3.0, 1.0
#: And those of a chunk of the loss: its norm, in part in fp32, and gradients.
_OF_HEAD = 6.5
#: Elements that a norm of transformers keeps for each that it gives, by the bytes of one: its input in fp32,
#: and what is multiplied with its weight. Those of Liger keep their input alone.
_NORM = {2: 3.0, 4: 2.0}
_FUSED_NORM = 1.0
#: While a gated MLP is differentiated, beside what it keeps: its activation, and gradients of its two halves.
#: Liger's makes them where the halves were: the gradient that comes is all there is beside.
_HALVES, _FUSED_HALVES = 3, 1
#: For each (token, choice) of a group of experts: its input, output and their gradients, of hidden size, some
#: in fp32; and the halves, their product and the gradients of all, of the experts' size. Those with biases
#: clamp their halves, which keeps more (gpt-oss).
_GROUP_OUTER, _GROUP_INNER, _CLAMPED_INNER = 5.5, 6, 9.5
#: The same of a stack of experts, whose parts go as soon as they are differentiated. Of one with biases the
#: most is there before: its biases as well, one for each (token, choice).
_STACK_OUTER, _STACK_INNER = 4, 5
_CLAMPED_STACK_OUTER, _CLAMPED_STACK_INNER = 2, 10
#: Tokens of the busiest expert by those of an even share; a group has `group_rows` at most.
_BUSIEST = 4
#: Keys and values for all heads of queries, for each element of a layer's input. On the CPU the most is held
#: in attention, not in the MLP after it: gradients of both as well, and of what attention gives.
_REPEATED, _REPEATED_ON_CPU = 2, 5
#: Bytes for each (token, choice): two indices of a layer that was run, and one on its way.
_ROUTING = 3 * 8
#: Blocks of the device's allocator, small tensors: of a layer times so much, of logits so much more.
_ROUNDED_UP, _LOGITS_ROUNDED_UP = 1.01, 0.02


def logits_bytes(case: Case) -> int:
    """Of a chunk of the loss."""
    train = case.config.train
    fused = ITEM_BYTES[case.units.head.dtype] if train.kernels == "liger" else None
    return _loss_tokens(case) * case.vocabulary * logit_nbytes(train.z_loss_coef, fused)


def head_bytes(case: Case) -> int:
    """Of hidden states, beside the logits of a chunk of the loss; and what blocks are larger than these."""
    item, width = ITEM_BYTES[case.units.embed.dtype], case.units.anatomy.boundary_width
    hidden = item * width * (2 * case.plan.tokens_per_step + _OF_HEAD * _loss_tokens(case))
    return int(hidden + _LOGITS_ROUNDED_UP * logits_bytes(case))


def _loss_tokens(case: Case) -> int:
    return min(case.plan.tokens_per_step, case.config.train.loss_chunk(case.vocabulary))


def inputs_bytes(config: RunConfig, units: ModelUnits) -> int:
    """Of the inputs of all layers that have a backward, from forward to there."""
    tokens = config.train.rows_per_step * config.data.seq_len
    nbytes = tokens * units.anatomy.boundary_width * ITEM_BYTES[units.embed.dtype]
    return (len(units.layers) - units.backward_from) * nbytes


def masks_bytes(case: Case) -> int:
    """Of the mask of all rows of a step, a byte for each pair of positions of a row. transformers makes it
    before the layers where documents of a row are isolated.
    """
    if not _masked(case):
        return 0
    return case.config.train.rows_per_step * case.config.data.seq_len**2


def masked_bytes(case: Case) -> int:
    """Of what attention makes of it in a layer: numbers, for the rows of a chunk; and keys and values for all
    heads of queries, with their gradients.
    """
    if not _masked(case):
        return 0
    train, seq_len = case.config.train, case.config.data.seq_len
    repeated = _REPEATED_ON_CPU if train.device == "cpu" else _REPEATED
    of_row = seq_len**2 + repeated * seq_len * case.units.anatomy.boundary_width
    return (train.rows_per_chunk or train.rows_per_step) * of_row * ITEM_BYTES[case.units.embed.dtype]


def _masked(case: Case) -> bool:
    """Whether rows may have several documents, in attention that takes a mask: that with sinks takes none."""
    data, attention = case.config.data, case.config.model.attention
    if not data.isolate_documents or data.packing == "none":
        return False
    if attention in ("sdpa", "eager"):
        return True
    names = (tensor.name for layer in case.units.layers for tensor in layer.tensors)
    return not any(name.endswith("sinks") for name in names)


def layer_bytes(case: Case) -> int:
    """Of the largest layer."""
    return max(_layer(case, index) for index in range(len(case.units.layers)))


def _layer(case: Case, index: int) -> int:
    train, units = case.config.train, case.units
    all_tokens, seq_len = case.plan.tokens_per_step, case.config.data.seq_len
    tokens = (train.rows_per_chunk or train.rows_per_step) * seq_len
    item, width = ITEM_BYTES[units.embed.dtype], units.anatomy.boundary_width
    tensors = [tensor for unit in (units.layers[index], *units.beside[index]) for tensor in unit.tensors]
    choices = choices_of(units, index)
    gradients = sum(tensor.numel for tensor in tensors)
    kept = tokens * _kept(tensors, width, train.kernels, item)
    if units.experts[index]:
        pairs = all_tokens * choices
        most = kept + max(pairs * width + _group(case, index, pairs), gradients)
    elif stacks := stacks_of(tensors):
        inner = sum(math.prod(tensor.shape[1:]) for tensor in stacks) / (3 * width)
        # The gradient of the larger stack comes when most of what was kept has gone.
        pairs, first = tokens * choices, gradients - max(tensor.numel for tensor in stacks)
        most = kept + max(pairs * (_STACK_OUTER * width + _STACK_INNER * inner) + first, gradients)
        if _is_clamped(tensors):
            most = max(most, kept + pairs * (_CLAMPED_STACK_OUTER * width + _CLAMPED_STACK_INNER * inner))
    else:
        # The MLP is differentiated first, and when gradients of all are there what it kept is gone.
        largest = max(tensor.numel for tensor in tensors)
        most = kept + max(tokens * _while_differentiated(tensors, width, train.kernels) + largest, gradients)
    in_chunks = tokens < all_tokens
    boundaries = (_OF_ALL_ROWS + in_chunks) * all_tokens + (_OF_CHUNK + in_chunks) * tokens
    routed = len(units.layers) * all_tokens * choices * _ROUTING
    return int(item * (_ROUNDED_UP * most + boundaries * width)) + routed


def _kept(tensors: Sequence[TensorSpec], width: int, kernels: str, item: int) -> float:
    """Elements for each token that norms and products keep.

    Args:
        width: of the layer's input.
    """
    inner = _inner(tensors, width)
    of_norm = _FUSED_NORM if kernels == "liger" else _NORM[item]
    total = float(sum(inner.values()))
    for tensor in tensors:
        if len(tensor.shape) != 1 or tensor.name.endswith("bias"):
            continue
        if (product := tensor.name.replace("_norm.", "_proj.")) in inner:  # of each head of queries or keys
            total += of_norm * inner[product]
        elif tensor.name.endswith("sinks"):  # attention keeps its output without them, too
            total += max(size for name, size in inner.items() if "o_proj" in name)
        else:
            total += (of_norm + 1) * tensor.numel
    return total - width if kernels == "liger" else total  # the input of the first norm is the layer's


def _while_differentiated(tensors: Sequence[TensorSpec], width: int, kernels: str) -> int:
    """Elements for each token that are there while an MLP is differentiated, beside what it keeps."""
    inner = _inner(tensors, width)
    gated = [size for name, size in inner.items() if "gate_proj" in name]
    if gated:
        return max(gated) * (_FUSED_HALVES if kernels == "liger" else _HALVES)
    return max(inner.values(), default=0)


def _inner(tensors: Sequence[TensorSpec], width: int) -> dict[str, int]:
    """Matrix -> elements for each token on the side of it that is not the layer's input or output."""
    matrices = {tensor.name: tensor.shape for tensor in tensors if len(tensor.shape) == 2}
    return {name: out if into == width else into for name, (out, into) in matrices.items()}


def _group(case: Case, index: int, pairs: int) -> float:
    """Elements of the experts that are differentiated together.

    Args:
        pairs: (token, choice) pairs of the layer.
    """
    experts, width, group = case.units.experts[index], case.units.anatomy.boundary_width, case.expert_group
    busiest = min(case.plan.tokens_per_step, _BUSIEST * pairs // len(experts))
    rows = min(pairs, max(busiest, group_rows(pairs, len(experts), group)))
    numel = experts[0].numel
    inner = (_CLAMPED_INNER if _is_clamped(experts[0].tensors) else _GROUP_INNER) * numel / (3 * width)
    return rows * (_GROUP_OUTER * width + inner) + 2 * group * numel


def _is_clamped(tensors: Sequence[TensorSpec]) -> bool:
    """Experts among them have biases, and so halves that are clamped (gpt-oss)."""
    return any(".experts." in tensor.name and tensor.name.endswith("_bias") for tensor in tensors)


def choices_of(units: ModelUnits, layer: int) -> int:
    """Experts that a token goes to; 0: the layer has none."""
    experts, passed_by = units.experts[layer], units.passed_by[layer]
    if experts:
        return len(experts) - passed_by // experts[0].parameters
    stacks = stacks_of(units.layers[layer].tensors)
    if not stacks:
        return 0
    return stacks[0].shape[0] - passed_by // sum(math.prod(t.shape[1:]) for t in stacks)


def stacks_of(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Matrices of the experts that are part of a layer, [experts, ., .] each."""
    return [tensor for tensor in tensors if len(tensor.shape) == 3]
