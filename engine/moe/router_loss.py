"""Losses of the routers over a whole step, of which no layer's logits are kept.

Both are means over all tokens of all layers, padding left out. The balancing loss is `E * sum_e f_e * P_e`
(Switch Transformers, arXiv 2101.03961, eq. 4): `f_e` is how often expert `e` is among a token's most likely
ones, `P_e` its mean probability. It is a product of means, so no layer has a loss of its own; but `f_e` has
no gradient, and is known when forward has ended. In the recompute each layer then adds its share of the sum,
`E * sum_e f_e * p_e` over its tokens, and the gradients are those of the whole. The z-loss, the mean of
`logsumexp(logits)^2` (ST-MoE, arXiv 2202.08906, eq. 5), is a sum anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tierstream.engine.model.carve import experts_of
from tierstream.engine.model.decoder import decoder_of, layers_of
from tierstream.engine.moe.config import MoeConfig
from tierstream.io.errors import ConfigError, InvariantError, ModelSourceError


class _Loss(Protocol):
    """A mean over the step. `kept`: bool [tokens], what is no padding; None: all."""

    def begin_step(self) -> None: ...
    def add(self, logits: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Forward: what one router said of all tokens; [tokens, experts]."""

    def share(self, logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Recompute: 0-dim fp32, with its graph. All shares together have the gradients of the loss."""

    @property
    def value(self) -> torch.Tensor:
        """0-dim fp64."""


class _Balance:
    """`load_balancing_loss_func` of transformers, whose numbers it gives: the probabilities have the type of
    the logits, and the most likely experts are counted, not those that the router has chosen.

    Args:
        choices: experts per token.
    """

    def __init__(self, choices: int) -> None:
        self._choices = choices

    def begin_step(self) -> None:
        self._tokens = self._chosen = self._probability = torch.zeros((), dtype=torch.float64)

    def add(self, logits: torch.Tensor, kept: torch.Tensor | None) -> None:
        probabilities = logits.softmax(-1)
        chosen = count_choices(probabilities.topk(self._choices).indices, logits.shape[-1], kept)
        self._tokens = self._tokens + _count(logits, kept)
        self._chosen = self._chosen + chosen
        self._probability = self._probability + _summed(probabilities, kept).double()

    def share(self, logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        weights = logits.shape[-1] * self._chosen / self._tokens**2
        return (_summed(logits.softmax(-1), kept) * weights.float()).sum()

    @property
    def value(self) -> torch.Tensor:
        loads = self._chosen / self._tokens
        return loads.numel() * (loads * self._probability / self._tokens).sum()


class _LogitSize:
    """The z-loss; in fp32 whatever the type of the logits."""

    def begin_step(self) -> None:
        self._tokens = self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, logits: torch.Tensor, kept: torch.Tensor | None) -> None:
        self._tokens = self._tokens + _count(logits, kept)
        self._squares = self._squares + self._sum(logits, kept).double()

    def share(self, logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        return self._sum(logits, kept) / self._tokens.float()

    @property
    def value(self) -> torch.Tensor:
        return self._squares / self._tokens

    def _sum(self, logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        return _summed(logits.float().logsumexp(-1).square().unsqueeze(-1), kept)[0]


class RouterLosses:
    """Those of a step; forward adds to them layer after layer, and the recompute takes its shares.

    Args:
        aux_coef, z_coef: what the losses are multiplied with; 0: the loss is not computed.
        choices: experts per token.

    Attributes:
        wanted: whether there are any.
    """

    def __init__(self, aux_coef: float, z_coef: float, choices: int) -> None:
        losses: list[tuple[str, float, _Loss]] = [
            ("aux", aux_coef, _Balance(choices)),
            ("z", z_coef, _LogitSize()),
        ]
        self._losses = {name: (coef, loss) for name, coef, loss in losses if coef}
        self.wanted = bool(self._losses)
        self._kept: torch.Tensor | None = None

    def begin_step(self, padding: torch.Tensor | None) -> None:
        """Args: padding: bool [rows, seq_len]; None: there is none."""
        self._kept = None if padding is None else ~padding
        for _, loss in self._losses.values():
            loss.begin_step()

    def add(self, logits: torch.Tensor) -> None:
        """Forward: what one router said of all tokens of the step; [tokens, experts]."""
        for _, loss in self._losses.values():
            loss.add(logits, self._kept_of(slice(None)))

    def share(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Recompute: what one router's logits for these rows add to the step's loss; 0-dim fp32."""
        shares = [coef * loss.share(logits, self._kept_of(rows)) for coef, loss in self._losses.values()]
        return torch.stack(shares).sum()

    def values(self) -> dict[str, float]:
        """`aux` and `z`, where computed, without their coefficients. Waits for the device."""
        return {name: loss.value.item() for name, (_, loss) in self._losses.items()}

    def _kept_of(self, rows: slice) -> torch.Tensor | None:
        return None if self._kept is None else self._kept[rows].reshape(-1)


class LayerRouters:
    """The routers of one layer: hooks keep their logits, of this layer alone, until they are asked for.

    Args:
        routers: as `find_routers` gives them. experts: of the layer; each router must speak of all of them.
    """

    def __init__(self, routers: list[tuple[nn.Module, int]], experts: int, losses: RouterLosses) -> None:
        self._experts, self._losses = experts, losses
        self._logits: list[list[torch.Tensor]] = [[] for _ in routers]
        for (router, index), logits in zip(routers, self._logits, strict=True):
            router.register_forward_hook(partial(self._keep, logits, index))

    def add(self) -> None:
        """All rows have run forward.

        Raises:
            InvariantError: a router has not, so its loss would be missing: layers that were compiled for a
                run without hooks do not see them.
        """
        if not all(self._logits):
            raise InvariantError("a router was not heard while its layer ran")
        for logits in self._taken():
            self._losses.add(logits)

    def shares(self, rows: slice) -> list[torch.Tensor]:
        """These rows were recomputed; see `RouterLosses.share`."""
        return [self._losses.share(logits, rows) for logits in self._taken()]

    def _keep(self, kept: list[torch.Tensor], index: int, router: nn.Module, args: Any, output: Any) -> None:
        logits = output[index] if isinstance(output, tuple) else output
        if logits.shape[-1] != self._experts:
            raise ModelSourceError(
                f"transformers records as router logits what {type(router).__name__} gives, which has the "
                f"shape {tuple(logits.shape)} and is none, with {self._experts} experts; set "
                "moe.aux_loss_coef and moe.z_loss_coef to 0"
            )
        kept.append(logits.reshape(-1, self._experts))

    def _taken(self) -> Iterator[torch.Tensor]:
        for kept in self._logits:
            logits = torch.cat(kept) if len(kept) > 1 else kept[0]
            kept.clear()
            yield logits


def router_losses(moe: MoeConfig, model: Any) -> RouterLosses:
    """What a run adds to its cross-entropy.

    Raises:
        ConfigError: transformers does not say where this model's router logits are.
    """
    coefs = {"aux": aux_loss_coef(moe, model.config), "z": moe.z_loss_coef}
    choices = getattr(model.config, "num_experts_per_tok", None) or 0
    found = choices and any(find_routers(model, layer) and experts_of(layer) for layer in layers_of(model))
    for name, coef in coefs.items():
        if coef and not found:
            raise ConfigError(
                f"moe.{name}_loss_coef is {coef}, but transformers records no router logits of "
                f"{type(model).__name__}; set it to 0"
            )
    return RouterLosses(coefs["aux"], coefs["z"], choices)


def aux_loss_coef(moe: MoeConfig, hf_config: Any) -> float:
    """What the run says, else what the model's configuration does if it turns the loss on."""
    if moe.aux_loss_coef is not None:
        return moe.aux_loss_coef
    turned_on = getattr(hf_config, "output_router_logits", False)
    return (getattr(hf_config, "router_aux_loss_coef", None) or 0.0) if turned_on else 0.0


def explain_router_losses(moe: MoeConfig, model: Any) -> list[str]:
    """What a run says of them; nothing where a model has no experts."""
    if not any(experts_of(layer) for layer in layers_of(model)):
        return []
    origin = "moe.aux_loss_coef" if moe.aux_loss_coef is not None else "the model's configuration"
    aux_coef = aux_loss_coef(moe, model.config)
    return [f"router losses: {aux_coef} x load balancing ({origin}), {moe.z_loss_coef} x z-loss"]


def layer_routers(model: Any, layer: nn.Module, losses: RouterLosses) -> LayerRouters | None:
    """None: the layer has no router, or there are no losses."""
    routers, experts = find_routers(model, layer), experts_of(layer)
    if not losses.wanted or not routers or experts is None:
        return None
    return LayerRouters(routers, len(next(experts.parameters())), losses)


def find_routers(model: Any, layer: nn.Module) -> list[tuple[nn.Module, int]]:
    """Modules of a layer that give router logits, and their place in the output, as transformers itself finds
    them: by what the model's class says can be recorded.
    """
    decoder = decoder_of(model)
    recorded = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits", [])
    specs = recorded if isinstance(recorded, list) else [recorded]
    names = {id(module): f".{name}." for name, module in decoder.named_modules()}
    return [
        (module, getattr(spec, "index", 1))
        for module in layer.modules()
        for spec in specs
        if _records(spec, module, names[id(module)])
    ]


def draws_choices(model: Any) -> bool:
    """Whether a router draws random numbers in training; found by running it on `meta`."""
    for layer in layers_of(model):
        for router, _ in find_routers(model, layer):
            width = model.config.hidden_size
            tokens = torch.empty(1, 2, width, dtype=model.dtype, device="meta")
            with torch.no_grad(), _Draws() as draws:
                router(tokens)
            return draws.found
    return False


class _Draws(TorchDispatchMode):
    """Hears of operations that take random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _records(spec: Any, module: nn.Module, name: str) -> bool:
    """Whether one entry of `_can_record_outputs` (an OutputRecorder, a class, or the end of a name) means a
    module.

    Args:
        name: between dots.
    """
    cls = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
    ending = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
    inside = getattr(spec, "layer_name", None)
    found = (cls is not None and isinstance(module, cls)) or (
        ending is not None and name.rstrip(".").endswith(ending)
    )
    return found and (inside is None or f".{inside.strip('.')}." in name)


def count_choices(index: torch.Tensor, experts: int, kept: torch.Tensor | None) -> torch.Tensor:
    """How many tokens have each expert among their choices; int64 [experts]. Exact, and deterministic.

    Args:
        index: int64 [tokens, choices], none twice for a token. kept: see `_Loss`.
    """
    chosen = torch.zeros(len(index), experts, dtype=torch.bool, device=index.device)
    chosen.scatter_(-1, index, True)
    return (chosen if kept is None else chosen & kept.unsqueeze(-1)).sum(0)


def _count(logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor | int:
    return len(logits) if kept is None else kept.sum()


def _summed(values: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """[tokens, n] -> fp32 [n], over the tokens that count."""
    values = values.float()
    return (values if kept is None else values * kept.unsqueeze(-1)).sum(0)
