"""Experts of a layer, computed one after another while their weights come and go.

Tokens are sorted by expert once. Each expert with tokens is taken from the cache, computes its tokens, and
makes room for the next; an expert without tokens is not touched. In backward each comes once more, its
forward is computed again with gradients, and its gradient leaves for its own plane. The sum over a token's
experts is that of transformers' grouped_mm: one slot for each (token, choice), added up in fp32.

What the flags of transformers' `use_experts_implementation` say is all that is known of a family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tierstream.engine.device.device import Device
from tierstream.engine.moe.cache import ExpertCache, ExpertShapes
from tierstream.engine.step.gradients import GradientBuffers
from tierstream.tiered.layout import Unit

#: Within, calls of torch are not looked at by modes: what follows routers' choices has no part in what goes
#: on between experts, and costs as much as the calls.
_PLAIN = torch._C.DisableTorchFunction


@dataclass(frozen=True, slots=True)
class Routing:
    """Which tokens go to which expert.

    Attributes:
        order: int64 [tokens * choices], the (token, choice) pairs sorted by expert.
        tokens: the same, the token of each of them.
        spans: expert -> its first and last pair in `order`; only of those that have any, in order.
        choices: experts per token.
    """

    order: torch.Tensor
    tokens: torch.Tensor
    spans: dict[int, tuple[int, int]]
    choices: int

    @classmethod
    def of(cls, index: torch.Tensor, experts: int) -> Routing:
        """Args: index: int64 [tokens, choices], an expert each. Waits for the device."""
        flat = index.reshape(-1)
        counts = torch.bincount(flat, minlength=experts).tolist()
        spans, start = {}, 0
        for expert, count in enumerate(counts):
            if count:
                spans[expert] = start, start + count
                start += count
        order = torch.sort(flat, stable=True).indices
        return cls(order, order // index.shape[-1], spans, index.shape[-1])


class StreamedExperts:
    """Stands in for the forward of a module that holds experts.

    Args:
        module: its parameters stay on `meta`.
        units: of the experts, in order.
        before: those of the layer with experts before this one.
        goes_back: their backward follows this one's.

    Attributes:
        routing: of the latest forward, which the recompute uses.
        trained: or frozen, all of them.
        anchor: an input of each run with gradients, which requires one if the experts are trained: without
            such an input no graph would be recorded.
        output_needed: the recompute must make the output's values; False once it is known that nothing but
            sums follows, whose gradients do not depend on them.
        last_output: of the latest run with gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        device: Device,
        cache: ExpertCache,
        gradients: GradientBuffers,
        *,
        before: StreamedExperts | None,
        goes_back: bool,
    ) -> None:
        self.module, self.units = module, units
        self._next_back = before if goes_back else None
        self.trained = any(unit.trained for unit in units)
        self.anchor = torch.zeros((), requires_grad=self.trained)
        self._after: StreamedExperts | None = None
        if before is not None:
            before._after = self
        self._device, self._cache, self._gradients = device, cache, gradients
        self._shapes = ExpertShapes.of(units[0])
        self.routing: Routing | None = None
        self.output_needed = True
        self.last_output: torch.Tensor | None = None

    @property
    def hit(self) -> list[str]:
        """Units of the experts that have tokens."""
        assert self.routing is not None
        return [self.units[expert].name for expert in self.routing.spans]

    @property
    def tokens(self) -> dict[int, int]:
        """Expert -> its tokens (with each of their choices), of those that have any in the latest forward."""
        if self.routing is None:
            return {}
        return {expert: last - first for expert, (first, last) in self.routing.spans.items()}

    @property
    def idle(self) -> list[Unit]:
        """Units of the experts without tokens."""
        assert self.routing is not None
        return [unit for expert, unit in enumerate(self.units) if expert not in self.routing.spans]

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As an experts function of transformers.

        Args:
            hidden: [tokens, hidden size]. index, weights: [tokens, choices].
        """
        if torch.is_grad_enabled():
            self.last_output = _Experts.apply(self, hidden, weights, self.anchor)
            return self.last_output
        self.routing = Routing.of(index, len(self.units))
        out = self.compute(hidden, weights)
        if self._after is not None and self._after.routing is not None:
            self._cache.expect(self._after.hit)  # as in the step before
        return out

    def compute(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The output, without a graph."""
        routing = self.routing
        assert routing is not None
        with _PLAIN():
            pairs = hidden.new_empty(len(routing.order), hidden.shape[-1])
            for expert, parameters in self._streamed():
                mine = slice(*routing.spans[expert])
                tokens = routing.tokens[mine]
                out = self._mlp(self._padded(hidden[tokens]), parameters)
                pairs[routing.order[mine]] = out[: len(tokens)]
            return _summed(pairs * weights.reshape(-1, 1), routing.choices).to(hidden.dtype)

    def skipped(self, hidden: torch.Tensor) -> torch.Tensor:
        """Memory of the output's shape, whose content nothing needs."""
        empty = torch.empty_like(hidden)
        return empty.fill_(torch.nan) if self._device.faults else empty

    def gradient(
        self, hidden: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of `hidden` and of `weights`; those of the experts go to their planes.

        Args:
            grad: of the output.
        """
        routing = self.routing
        assert routing is not None
        with _PLAIN():
            flat_weights = weights.reshape(-1)
            grad_pairs = hidden.new_empty(len(routing.order), hidden.shape[-1])
            grad_weights = torch.empty_like(flat_weights)
            for expert, parameters in self._streamed():
                mine = slice(*routing.spans[expert])
                pairs, tokens = routing.order[mine], routing.tokens[mine]
                part = self._padded(hidden[tokens]).requires_grad_()
                with torch.enable_grad():
                    out = self._mlp(part, parameters)
                coming = grad[tokens].to(torch.result_type(grad, weights))
                grad_weights[pairs] = (out.detach()[: len(tokens)] * coming).sum(-1).to(weights.dtype)
                grad_out = self._padded((coming * flat_weights[pairs].unsqueeze(-1)).to(out.dtype))
                wanted = [part, *parameters.values()] if self.trained else [part]
                grad_part, *grads = torch.autograd.grad(out, wanted, grad_out)
                grad_pairs[pairs] = grad_part[: len(tokens)]
                if self.trained:
                    self._gradients.open(self.units[expert]).add(grads)
                    self._gradients.close(self.units[expert])
            if self._next_back is not None:
                self._cache.expect(self._next_back.hit)
            grad_hidden = _summed(grad_pairs, routing.choices).to(hidden.dtype)
            return grad_hidden, grad_weights.view_as(weights)

    def _streamed(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Every expert that has tokens with its parameters, in the order in which they come."""
        assert self.routing is not None
        experts = {self.units[expert].name: expert for expert in self.routing.spans}
        for name in self._cache.want(list(experts)):
            yield experts[name], self._cache.take(name, self._shapes)
            self._cache.release(name)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of zeros below, up to a number of rows that comes again; they add zeros to gradients."""
        missing = -len(rows) % self._device.product_rows
        return functional.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _mlp(self, x: torch.Tensor, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One expert over its tokens."""
        module = self.module
        gated = getattr(module, "has_gate", True)
        hidden = self._project(x, own, "gate_up_proj" if gated else "up_proj")
        hidden = module._apply_gate(hidden) if gated else module.act_fn(hidden)  # type: ignore[operator]
        return self._project(hidden, own, "down_proj")

    def _project(self, x: torch.Tensor, own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        matrix = own[name] if self.module.is_transposed else own[name].t()
        return x @ matrix + own[f"{name}_bias"] if self.module.has_bias else x @ matrix


class _Experts(torch.autograd.Function):
    """Experts of a layer in its recompute; their weights are no inputs."""

    @staticmethod
    def forward(
        ctx: Any, experts: StreamedExperts, hidden: torch.Tensor, weights: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.experts = experts
        ctx.save_for_backward(hidden, weights)
        return experts.compute(hidden, weights) if experts.output_needed else experts.skipped(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.experts.gradient(*ctx.saved_tensors, grads[0]), None


def _summed(pairs: torch.Tensor, choices: int) -> torch.Tensor:
    """[tokens * choices, n] -> [tokens, n]."""
    return pairs.view(-1, choices, pairs.shape[-1]).sum(1)
