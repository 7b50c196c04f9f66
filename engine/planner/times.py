"""How long the device computes on each part of a step: by a model of the machine, or as a trace says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeAlias

from tierstream.engine.bound import Rates
from tierstream.engine.planner.activations import choices_of, stacks_of
from tierstream.engine.planner.case import Case
from tierstream.engine.planner.machine import Machine
from tierstream.engine.trace.trace import Span, Track
from tierstream.tiered.layout import ITEM_BYTES, Unit

#: Of most figures two: of forward, and of recompute with backward.
_Both: TypeAlias = tuple[float, float]
#: FLOP of attention for each token, position of its row and element of all heads. All positions are counted:
#: kernels that leave out what a causal mask hides reach about half of the rate of a product. Windows are not
#: known.
_ATTENTION: _Both = (4, 14)
#: Bytes that cross the device's memory for each parameter of a gradient: read as autograd gives it, added to
#: an fp32 sum, squared; and of an update on the device.
_GRADIENT_BYTES, _UPDATE_BYTES = 14, 26


class LayerTimes(Protocol):
    """Seconds of the compute lane, for all rows of a step."""

    def compute_s(self, what: str, unit: str) -> float:
        """Of one piece of work.

        Args:
            what: as a trace names it: "forward", "backward" (with its recompute), "head" or "adamw".
            unit: whose weights; a layer is meant with all of its experts.
        """
        ...


@dataclass(frozen=True)
class Known:
    """Times by (what, unit); of units that were not seen those of another of the same kind."""

    seconds: Mapping[tuple[str, str], float]

    def compute_s(self, what: str, unit: str) -> float:
        if (what, unit) in self.seconds:
            return self.seconds[what, unit]
        kind = unit.partition(".")[0]
        like = [
            seconds
            for (own, name), seconds in self.seconds.items()
            if own == what and name.partition(".")[0] == kind
        ]
        return median(like) if like else 0.0


def times_of_trace(spans: Sequence[Span]) -> Known:
    """What a trace says of each unit, the median over its steps: the time of its spans on the lane `compute`,
    less what was waited for within them (experts).
    """
    waits = [span for span in spans if span.track is Track.HOST and span.waiting]
    found: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        if span.track is Track.COMPUTE:
            waited = sum(
                wait.end_s - wait.begin_s
                for wait in waits
                if span.begin_s <= wait.begin_s and wait.end_s <= span.end_s
            )
            found.setdefault((span.what, span.unit), []).append(span.end_s - span.begin_s - waited)
    return Known({key: median(times) for key, times in found.items()})


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a part of a step asks of the device.

    Attributes:
        nbytes: through its memory, beside the weights that products read.
        ops: what Python does, in pages: as long as it takes for a page.
        launches: operations of torch.
        products: how many, of matrices that have so many `weights` in all.
        wide: operations on a tensor that has all tokens and is as wide as the layer's input.
    """

    flop: float = 0.0
    nbytes: float = 0.0
    ops: float = 0.0
    launches: float = 0.0
    products: float = 0.0
    weights: float = 0.0
    wide: float = 0.0


class _Gpu:
    """Products and the rest take turns; the thread that enqueues runs beside them.

    What H200 traces of single layers take beyond products and attention (docs/log.md, "layer by layer").

    Attributes:
        passes: how often what goes into and comes out of a matrix product crosses the device's memory, with
            the operations around it. expert_passes: of experts, which are also sorted, weighted and summed.
            stacked_passes: of those that are part of their layer, which transformers computes, and masks.
        ops: for each tensor of a layer; experts that come on their own have theirs in groups. expert_ops: for
            each of these beside.
        logit_bytes: fp32 logits, their exponentials and their gradient, softmax at half the memory's rate;
            or bf16 ones, in whose place their gradient is put.
        sum_bytes: of the head's gradient, for each parameter and chunk of tokens.
        group: experts that are one call.
    """

    launches: _Both = (7, 22)
    expert_ops: _Both = (10, 40)
    expert_passes: _Both = (11, 29)
    stacked_passes: _Both = (15, 41)

    def __init__(self, case: Case, rates: Rates) -> None:
        self._rates, fused = rates, case.config.train.kernels == "liger"
        self.passes: _Both = (1.2, 3.6) if fused else (4.0, 12.0)
        #: A kernel of Triton costs Python more than one of torch.
        self.ops: _Both = (12, 17) if fused else (10, 17)
        self.logit_bytes, self.sum_bytes = (6, 8) if fused else (52, 12)
        self.group = case.expert_group

    def seconds(self, work: _Work) -> float:
        rates = self._rates
        computed_s = work.flop / rates.flop_per_s + work.nbytes / rates.device_memory
        return max(computed_s, work.ops * rates.page_s + work.launches * rates.launch_s)


class _Cpu:
    """All of it takes turns, Python too; what all cores share wakes the others, and waits for them.

    Attributes:
        passes: as torch's dispatcher counts them, twice: memory that is new is read before it is written.
        ops, expert_ops: with what Python does between layers: models of width 64, which hardly compute, with
            one thread and with two.
        launches: none, Python's operations are with them. All others: as of a GPU.
    """

    passes = expert_passes = stacked_passes = (6.0, 20.0)
    ops: _Both = (7, 14)
    expert_ops: _Both = (16, 43)
    launches: _Both = (0, 0)
    logit_bytes, sum_bytes, group = 28, 0, 1
    #: How often a product moves its weights through memory: read, written in the order in which they are
    #: used, and read again.
    _PACKING = 3
    #: How often a product begins work on all cores: to pack either matrix, and to multiply.
    _REGIONS = 3
    #: Elements of the largest operation that torch leaves to one core (at::internal::GRAIN_SIZE).
    _GRAIN = 1 << 15
    #: To begin and to end such work.
    _WAKES = 2

    def __init__(self, case: Case, rates: Rates, cores: int) -> None:
        self._rates, self._cores = rates, cores
        self._item = ITEM_BYTES[case.units.embed.dtype]
        train, width = case.config.train, case.units.anatomy.boundary_width
        rows = train.rows_per_chunk or train.rows_per_step
        self._shares_wide = rows * case.config.data.seq_len * width > self._GRAIN

    def seconds(self, work: _Work) -> float:
        rates = self._rates
        nbytes = work.nbytes + self._PACKING * self._item * work.weights
        computed_s = work.flop / rates.flop_per_s + nbytes / rates.device_memory
        # Python's part in an operation is about what it takes for a page.
        return computed_s + work.ops * rates.page_s + self._wakes(work) * rates.wake_s

    def _wakes(self, work: _Work) -> float:
        if self._cores == 1:
            return 0.0
        return self._WAKES * (self._REGIONS * work.products + self._shares_wide * work.wide)


def modelled_times(case: Case, machine: Machine) -> Known:
    """Floating-point work, bytes through the device's memory and operations, each at the machine's rate."""
    model = _Model(case, machine)
    units, found = case.units, dict[tuple[str, str], float]()
    for index, layer in enumerate(units.layers):
        for which, what in enumerate(("forward", "backward")):
            found[what, layer.name] = model.device.seconds(model.layer(index, which))
    found["head", units.head.name] = model.device.seconds(model.head())
    for unit in units.begin:
        for which, what in enumerate(("forward", "backward")):
            found[what, unit.name] = model.device.seconds(model.begin(unit, which))
    for unit in units.without_experts:  # of which alone some stay, and are updated there
        found["adamw", unit.name] = model.device.seconds(_Work(nbytes=_UPDATE_BYTES * unit.numel))
    return Known(found)


class _Model:
    """What the parts of a step ask of the device."""

    #: Wide operations of a layer for each of its tensors, and of the head: Qwen2's, counted.
    _WIDE: _Both = (2, 6)

    def __init__(self, case: Case, machine: Machine) -> None:
        self._case, rates = case, machine.rates
        on_gpu = machine.gpu_bytes is not None
        self.device: _Gpu | _Cpu = _Gpu(case, rates) if on_gpu else _Cpu(case, rates, machine.cores)
        self._item, self._tokens = ITEM_BYTES[case.units.embed.dtype], case.plan.tokens_per_step
        rows = case.config.train.rows_per_step
        self._chunks = -(-rows // (case.config.train.rows_per_chunk or rows))

    def layer(self, index: int, which: int) -> _Work:
        """Args: which: 0: forward, 1: recompute with backward."""
        units, tokens, chunks, device = self._case.units, self._tokens, self._chunks, self.device
        layer, own, passed_by = units.layers[index], units.layers_summed[index], units.passed_by[index]
        product = 2.0 * tokens * (own.parameters - passed_by)
        products = (1, 3)[which]
        # The recompute's last product is needed by nobody.
        spared = 2.0 * tokens * max(t.numel for t in layer.tensors) if which and not passed_by else 0.0
        experts = units.experts[index]
        tensors = chunks * own.tensors
        if experts:  # those that come together are one call
            each = len(experts[0].tensors)
            tensors = chunks * (own.tensors - each * len(experts)) + each * -(-len(experts) // device.group)
        return _Work(
            flop=products * product - spared + _ATTENTION[which] * tokens * self._attention_width(layer),
            nbytes=self._item * tokens * self._crossings(index, which)
            + _GRADIENT_BYTES * own.parameters * which,
            ops=device.ops[which] * tensors + device.expert_ops[which] * len(experts),
            launches=device.launches[which] * tensors,
            products=products * chunks * own.matrices,
            weights=products * chunks * own.parameters,
            wide=self._WIDE[which] * chunks * len(layer.tensors),
        )

    def _crossings(self, index: int, which: int) -> float:
        """How many elements of each token cross the device's memory in a layer. Edges are what goes into and
        comes out of its products.
        """
        units, device = self._case.units, self.device
        apart, stacks = units.experts[index], stacks_of(units.layers[index].tensors)
        shapes = [t.shape for t in apart[0].tensors] if apart else [t.shape[1:] for t in stacks]
        expert = sum(map(sum, shapes))
        of_experts = len(apart) * expert if apart else sum(sum(t.shape) for t in stacks)
        dense = units.layers_summed[index].edges - of_experts
        passes = device.expert_passes if apart else device.stacked_passes
        return device.passes[which] * dense + passes[which] * choices_of(units, index) * expert

    def _attention_width(self, layer: Unit) -> int:
        """Positions of a row, times elements of all heads."""
        inner = [t.shape[-1] for t in layer.tensors if t.name.endswith("o_proj.weight")]
        width = inner[0] if inner else self._case.units.anatomy.boundary_width
        return self._case.config.data.seq_len * width

    def head(self) -> _Work:
        """Nothing of it is recomputed."""
        head, tokens, train = self._case.units.head, self._tokens, self._case.config.train
        chunks = -(-tokens // train.loss_chunk(self._case.vocabulary))
        count = chunks * len(head.tensors)
        return _Work(
            flop=6.0 * tokens * head.parameters,
            nbytes=self.device.logit_bytes * tokens * self._case.vocabulary
            + (self.device.sum_bytes * chunks + _GRADIENT_BYTES) * head.parameters,
            ops=sum(self.device.ops) * count,
            launches=sum(self.device.launches) * count,
            products=3 * chunks,
            weights=3 * chunks * head.parameters,
            wide=sum(self._WIDE) * count,
        )

    def begin(self, unit: Unit, which: int) -> _Work:
        """A look-up."""
        row_bytes = unit.tensors[0].shape[-1] * self._item
        return _Work(
            nbytes=(2, 10)[which] * self._tokens * row_bytes + _GRADIENT_BYTES * unit.numel * which,
            ops=self.device.ops[which],
            launches=self.device.launches[which],
        )
