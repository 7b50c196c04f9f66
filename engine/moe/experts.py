"""Experts of a layer, computed a few at a time while their weights come and go.

Tokens are sorted by expert once. Experts with tokens are taken from the cache in groups, which compute their
tokens while the next ones come; an expert without tokens is not touched. In backward each comes once more,
its forward is computed again with gradients, and its gradient leaves for its own plane. The sum over a
token's experts is that of transformers' grouped_mm: one slot for each (token, choice), added up in fp32.

A group costs the thread that enqueues what a single expert would. It changes no bit: an expert's products are
its own, and so are its gradient's.

What the flags of transformers' `use_experts_implementation` say is all that is known of a family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstream.engine.device.device import Device
from tierstream.engine.device.memory import group_rows
from tierstream.engine.moe.cache import ExpertCache, ExpertShapes
from tierstream.engine.moe.products import Groups, groups, together
from tierstream.engine.step.gradients import GradientBuffers
from tierstream.tiered.layout import Unit

#: Within, calls of torch are not looked at by modes: what follows routers' choices has no part in what goes
#: on between experts, and costs as much as the calls.
_PLAIN = torch._C.DisableTorchFunction


@dataclass(frozen=True, slots=True)
class Routing:
    """Which tokens go to which expert.

    Attributes:
        pairs: expert -> int64 [its tokens], its (token, choice) pairs; in order, of experts that have any.
        choices: experts per token.
        tokens: how many there are.
    """

    pairs: dict[int, torch.Tensor]
    choices: int
    tokens: int

    @classmethod
    def of(cls, index: torch.Tensor, experts: int) -> Routing:
        """Args: index: int64 [tokens, choices], an expert each. Waits for the device."""
        tokens, choices = index.shape
        flat = index.reshape(-1)
        counts = torch.bincount(flat, minlength=experts).tolist()
        parts = torch.sort(flat, stable=True).indices.split(counts)
        return cls({expert: own for expert, own in enumerate(parts) if len(own)}, choices, tokens)


@dataclass(frozen=True, slots=True)
class _Group:
    """Experts that are computed together.

    Attributes:
        units: theirs.
        pairs, tokens: int64 [rows], the (token, choice) pair and the token of each row, expert by expert.
        rows: whose rows are whose.
        parameters: of each, by their names in the module.
    """

    units: list[Unit]
    pairs: torch.Tensor
    tokens: torch.Tensor
    rows: Groups
    parameters: list[dict[str, torch.Tensor]]


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
        self._output: torch.Tensor | None = None

    @property
    def hit(self) -> list[str]:
        """Units of the experts that have tokens."""
        assert self.routing is not None
        return [self.units[expert].name for expert in self.routing.pairs]

    @property
    def tokens(self) -> dict[int, int]:
        """Expert -> its tokens (with each of their choices), of those that have any in the latest forward."""
        if self.routing is None:
            return {}
        return {expert: len(pairs) for expert, pairs in self.routing.pairs.items()}

    @property
    def idle(self) -> list[Unit]:
        """Units of the experts without tokens."""
        assert self.routing is not None
        return [unit for expert, unit in enumerate(self.units) if expert not in self.routing.pairs]

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As an experts function of transformers.

        Args:
            hidden: [tokens, hidden size]. index, weights: [tokens, choices].
        """
        if torch.is_grad_enabled():
            self._output = _Experts.apply(self, hidden, weights, self.anchor)
            return self._output
        self.routing = Routing.of(index, len(self.units))
        out = self.compute(hidden, weights)
        if self._after is not None and self._after.routing is not None:
            self._cache.expect(self._after.hit)  # as in the step before
        return out

    def take_output(self) -> torch.Tensor:
        """That of the latest run with gradients. It must be taken: each layer would keep one."""
        output, self._output = self._output, None
        assert output is not None
        return output

    def compute(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The output, without a graph."""
        routing = self.routing
        assert routing is not None
        with _PLAIN():
            pairs = hidden.new_empty(routing.tokens * routing.choices, hidden.shape[-1])
            for group in self._streamed():
                pairs[group.pairs] = self._mlp(hidden[group.tokens], group)
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
            grad_pairs = hidden.new_empty(routing.tokens * routing.choices, hidden.shape[-1])
            grad_weights = torch.empty_like(flat_weights)
            for group in self._streamed():
                part = hidden[group.tokens].requires_grad_()
                leaves = [own for each in group.parameters for own in each.values()] if self.trained else []
                with torch.enable_grad():
                    out = self._mlp(part, group)
                coming = grad[group.tokens].to(torch.result_type(grad, weights))
                grad_weights[group.pairs] = (out.detach() * coming).sum(-1).to(weights.dtype)
                grad_out = (coming * flat_weights[group.pairs].unsqueeze(-1)).to(out.dtype)
                grad_pairs[group.pairs], *grads = torch.autograd.grad(out, [part, *leaves], grad_out)
                each = len(grads) // len(group.units)
                for index, unit in enumerate(group.units if self.trained else ()):
                    self._gradients.open(unit).add(grads[index * each : (index + 1) * each])
                    self._gradients.close(unit)
            if self._next_back is not None:
                self._cache.expect(self._next_back.hit)
            grad_hidden = _summed(grad_pairs, routing.choices).to(hidden.dtype)
            return grad_hidden, grad_weights.view_as(weights)

    def _streamed(self) -> Iterator[_Group]:
        """All experts that have tokens, with their parameters, as they come."""
        assert self.routing is not None
        pairs, size = self.routing.pairs, self._cache.group
        experts = {self.units[expert].name: expert for expert in pairs}
        names = self._cache.want(list(experts))
        counts = [len(pairs[experts[name]]) for name in names]
        most = group_rows(self.routing.tokens * self.routing.choices, len(self.units), size)
        parts = together(counts, size, most)
        for each, rows in zip(parts, groups(self._device, [counts[part] for part in parts]), strict=True):
            part = names[each]
            own = torch.cat([pairs[experts[name]] for name in part])
            units = [self.units[experts[name]] for name in part]
            parameters = self._cache.take(part, self._shapes)
            yield _Group(units, own, own // self.routing.choices, rows, parameters)
            self._cache.release(part)

    def _mlp(self, x: torch.Tensor, group: _Group) -> torch.Tensor:
        """Experts over their tokens."""
        module = self.module
        gated = getattr(module, "has_gate", True)
        hidden = self._project(x, group, "gate_up_proj" if gated else "up_proj")
        hidden = module._apply_gate(hidden) if gated else module.act_fn(hidden)  # type: ignore[operator]
        return self._project(hidden, group, "down_proj")

    def _project(self, x: torch.Tensor, group: _Group, name: str) -> torch.Tensor:
        module, matrices = self.module, [own[name] for own in group.parameters]
        out = group.rows.product(x, matrices, transposed=not module.is_transposed)
        if not module.has_bias:
            return out
        return group.rows.plus(out, [own[f"{name}_bias"] for own in group.parameters])


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
