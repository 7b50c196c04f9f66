"""Random weights: the family's own rules; the same values whatever the order, the units and the dtype."""

from __future__ import annotations

import _thread
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.families import MOE_FAMILIES, moe_config
from support.models import DENSE, Flat, different, tiny_hf_config, two_units
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tierstream.engine.model import initialise
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.initialise import init_weights
from tierstream.engine.model.meta_model import build_meta_model, nearest_pretrained, protected
from tierstream.engine.model.units import build_layout
from tierstream.engine.weights.state import PlaneWriter
from tierstream.io.errors import ModelSourceError
from tierstream.tiered.layout import TensorSpec, Unit, pack_unit
from tierstream.tiered.store import Store

#: Families with rules of other kinds: scaled projections, torch.rand, truncated normals.
OTHERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=4, n_head=2, n_positions=32, vocab_size=259),
    "mamba": lambda: transformers.MambaConfig(vocab_size=259, hidden_size=64, num_hidden_layers=2),
    "modernbert-decoder": lambda: transformers.ModernBertDecoderConfig(
        vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0,
    ),
}  # fmt: skip


def meta_model(path: Path, config: Any, dtype: str = "bfloat16") -> Any:
    config.save_pretrained(path)
    return build_meta_model(ModelConfig(config=str(path), dtype=dtype, attention="eager"))[0]  # type: ignore[arg-type]


def drawn(model: Any, units: list[Unit], seed: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    flat = Flat(units)
    init_weights(model, flat.units, seed, flat.write, **options)
    return flat.tensors()


@torch.no_grad()
def drawn_plainly(model: Any, units: list[Unit], seed: int = 1) -> dict[str, torch.Tensor]:
    """One after another, from torch's own generator, in the model itself; parts as stacks of one."""
    flat, modules = Flat(units), dict(model.named_modules())
    with protected(model.parameters()):
        for unit_name, spec in [(unit.name, spec) for unit in units for spec in unit.tensors]:
            around, _, key = spec.name.rpartition(".")
            owner, meta = modules[around], model.get_parameter(spec.name)
            seeded = spec.name if spec.part is None else f"{spec.name}[{spec.part}]"
            torch.manual_seed(initialise._tensor_seed(seed, seeded))
            shape = spec.shape if spec.part is None else (1, *spec.shape)
            owner._parameters[key] = torch.nn.Parameter(torch.full(shape, torch.nan))
            while True:
                nearest_pretrained(model, around)._init_weights(modules[around])
                if not around:
                    break
                around = around.rpartition(".")[0]
            flat.write(unit_name, spec.offset, owner._parameters[key].detach().numpy().ravel())
            owner._parameters[key] = meta
    return flat.tensors()


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.int32) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", [*DENSE, *OTHERS])
def test_threads_draw_the_bits_of_plain_torch(tmp_path: Path, family: str) -> None:
    model = meta_model(tmp_path, tiny_hf_config(family) if family in DENSE else OTHERS[family]())
    expected = bits(drawn_plainly(model, two_units(model)))
    for threads in (1, 2, 5):
        assert different(bits(drawn(model, two_units(model), threads=threads)), expected) == []


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_are_drawn_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """No rule ever sees more than one of a stack, and no two experts are the same."""
    model = meta_model(tmp_path, moe_config(family))
    units = list(find_units(model).in_forward_order)
    expected = drawn_plainly(model, units)
    largest = max(spec.numel for unit in units for spec in unit.tensors)
    rule = transformers.PreTrainedModel._init_weights

    def checked(self: Any, module: torch.nn.Module) -> None:
        assert sum(p.numel() for p in module.parameters() if not p.is_meta) <= largest
        rule(self, module)

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", checked)
    values = drawn(model, units, threads=3)
    assert different(bits(values), bits(expected)) == []
    experts = [e for name, stack in values.items() if ".experts." in name and stack.any() for e in stack]
    assert len({e.numpy().tobytes() for e in experts}) == len(experts) > 0
    shuffled = random.Random(1).sample(units, len(units))
    assert different(bits(drawn(model, shuffled)), bits(expected)) == []
    in_layers = list(find_units(model, experts_apart=False).in_forward_order)
    assert different(bits(drawn(model, in_layers)), bits(expected)) == []


def test_every_random_operation_is_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a generator and those without, of few and of many elements, in one stream of numbers."""

    def rule(self: Any, module: torch.nn.Module) -> None:
        for value in module._parameters.values():
            if value is None:
                continue
            if value.is_meta:  # draws nothing
                value.exponential_()
                continue
            flat = value.view(-1)
            flat[:3].normal_()
            flat[3:8].copy_(torch.rand(5))
            flat[8:11].exponential_()
            flat[11:18].copy_(torch.randn_like(flat[11:18]))
            flat[18:20].copy_(torch.randperm(2))
            flat[20:30].copy_(torch.normal(torch.zeros(10), 2.0))
            flat[30:40].copy_(torch.nn.functional.dropout(torch.ones(10)))
            torch.nn.init.trunc_normal_(flat[40:])

    model = meta_model(tmp_path, tiny_hf_config())
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", rule)
    expected = bits(drawn_plainly(model, two_units(model)))
    for threads in (1, 5):
        assert different(bits(drawn(model, two_units(model), threads=threads)), expected) == []


def test_threads_may_share_pages(tmp_path: Path) -> None:
    """No tensor ends where a page does, and pages are small."""
    model = meta_model(tmp_path, tiny_hf_config())
    units = find_units(model)
    layout = build_layout(units, page_bytes=4096, master="fp32", grad_dtype="float32", boundary_nbytes=None)
    store = Store(layout, dram_bytes=8 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0)
    flat = Flat(units.in_forward_order)
    with store:
        init_weights(model, units.in_forward_order, 1, PlaneWriter(store, layout), threads=8)
        for unit in flat.units:
            store.read_range(unit.name, "master", 0, flat.values[unit.name])
    assert different(bits(flat.tensors()), bits(drawn_plainly(model, flat.units))) == []


def one_tensor_units(model: Any) -> list[Unit]:
    return [pack_unit(name, "float32", [(name, tuple(p.shape), 0)]) for name, p in model.named_parameters()]


#: What a family draws by a rule of its own.
OWN_RULES = ("A_log",)


@pytest.mark.parametrize("family", [*DENSE, *MOE_FAMILIES])
def test_values_follow_the_rules_of_the_family(tmp_path: Path, family: str) -> None:
    """Constant tensors equal those of transformers; drawn ones have its mean and standard deviation."""
    make = tiny_hf_config if family in DENSE else moe_config
    config = make(family, initializer_range=0.05)
    model = meta_model(tmp_path, config)
    torch.manual_seed(0)
    reference = dict(
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters()
    )
    values = drawn(model, list(find_units(model).in_forward_order))
    assert values.keys() == reference.keys()
    for name, tensor in values.items():
        expected = reference[name].detach()
        if name.endswith(OWN_RULES):
            continue
        if torch.all(expected == expected.flatten()[0]):
            assert torch.equal(tensor, expected), name
        else:
            assert abs(float(tensor.mean())) < 4 * 0.05 / tensor.numel() ** 0.5
            assert float(tensor.std()) == pytest.approx(0.05, rel=4 / tensor.numel() ** 0.5)
    names = [name for name, value in values.items() if ".layers.1." in name and value.std() > 0]
    again = [name for name in names if name.replace(".1.", ".2.") in values]
    assert not any(torch.equal(values[name], values[name.replace(".1.", ".2.")]) for name in again)
    assert len(again) > 1


def test_values_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    model = meta_model(tmp_path / "bf16", tiny_hf_config())
    expected = drawn(model, two_units(model))
    shuffled = one_tensor_units(model)
    random.Random(4).shuffle(shuffled)
    torch.manual_seed(123)
    assert different(drawn(model, shuffled), expected) == []
    assert (
        different(drawn(meta_model(tmp_path / "fp32", tiny_hf_config(), "float32"), shuffled), expected) == []
    )
    again = drawn(model, two_units(model), seed=2)
    assert "model.layers.0.mlp.up_proj.weight" in different(again, expected)
    assert "model.norm.weight" not in different(again, expected)


def test_tied_matrix_is_drawn_once_and_as_untied(tmp_path: Path) -> None:
    tied = meta_model(tmp_path / "tied", tiny_hf_config(tie_word_embeddings=True))
    untied = meta_model(tmp_path / "untied", tiny_hf_config())
    values, others = drawn(tied, two_units(tied)), drawn(untied, two_units(untied))
    assert different(values, others) == ["lm_head.weight"]
    assert not torch.equal(others["lm_head.weight"], others["model.embed_tokens.weight"])


def test_padding_row_of_the_embedding_is_zero(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config(pad_token_id=5))
    embedding = drawn(model, two_units(model))["model.embed_tokens.weight"]
    assert (embedding == 0).all(dim=1).nonzero().flatten().tolist() == [5]


def test_rules_at_a_parent_module_apply(tmp_path: Path) -> None:
    """GPT-2 scales output projections by depth, in a rule that looks at the children of a block."""
    config = transformers.GPT2Config(n_embd=64, n_layer=8, n_head=2, n_positions=32, vocab_size=259)
    model = meta_model(tmp_path, config)
    values = drawn(model, two_units(model))
    scaled = config.initializer_range / (2 * config.n_layer) ** 0.5
    for name in ("transformer.h.3.attn.c_proj.weight", "transformer.h.7.mlp.c_proj.weight"):
        assert float(values[name].std()) == pytest.approx(scaled, rel=0.1)
    assert float(values["transformer.h.3.mlp.c_fc.weight"].std()) == pytest.approx(
        config.initializer_range, rel=0.1
    )


def test_models_flags_and_generators_are_left_as_they_were(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    torch.manual_seed(9)
    state = torch.get_rng_state()
    drawn(model, two_units(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(hasattr(parameter, "_is_hf_initialized") for parameter in model.parameters())
    assert not is_in_torch_dispatch_mode()


def test_parameter_without_a_rule_is_refused(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    model.model.layers[1].register_parameter("extra", torch.nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ModelSourceError, match=r"give model\.layers\.1\.extra no finite value"):
        drawn(model, one_tensor_units(model))


def test_an_error_ends_the_others(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    written: list[str] = []

    def write(unit: str, start: int, values: Any) -> None:
        written.append(unit)
        if len(written) == 3:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        init_weights(model, one_tensor_units(model), 1, write, threads=2)
    assert len(written) <= 4


def test_interrupt_does_not_hang(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    written: list[str] = []

    def write(unit: str, start: int, values: Any) -> None:
        written.append(unit)
        if len(written) == 5:  # not sooner: an executor forgets a thread that it is just starting
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        init_weights(model, two_units(model), 1, write, threads=2)
    assert not any(thread.name.startswith("tierstream-init") for thread in threading.enumerate())


def test_one_tensor_is_in_memory_with_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a rule draws, nothing holds what was drawn before."""
    model = meta_model(tmp_path, tiny_hf_config())
    written: list[weakref.ref] = []
    rule, calls = transformers.PreTrainedModel._init_weights, []

    def checked(self: Any, module: torch.nn.Module) -> None:
        assert not any(reference() is not None for reference in written)
        assert sum(not parameter.is_meta for parameter in self.parameters()) == 1
        calls.append(module)
        rule(self, module)

    def write(unit: str, start: int, values: Any) -> None:
        written.append(weakref.ref(values))

    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", checked)
    init_weights(model, two_units(model), 0, write, threads=1)
    assert len(written) == len(list(model.parameters()))
    assert len(calls) > len(written)


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    model = meta_model(tmp_path, tiny_hf_config())
    told: list[int] = []
    drawn(model, two_units(model), progress=told.append)
    assert len(told) > 1
    assert sum(told) == 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("floor", [0, 100_000, initialise.DRAWN_BYTES])
def test_memory_of_threads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: int) -> None:
    """By that of the largest tensor, or by what is allowed anyway."""
    monkeypatch.setattr(initialise, "DRAWN_BYTES", floor)
    model = meta_model(tmp_path, tiny_hf_config())
    draw, lock = initialise._draw, threading.Lock()
    held: list[int] = []
    most = {"elements": 0, "tensors": 0}

    def counted(model: Any, spec: TensorSpec, seed: int) -> Any:
        with lock:
            held.append(spec.numel)
            most.update(elements=max(most["elements"], sum(held)), tensors=max(most["tensors"], len(held)))
        return draw(model, spec, seed)

    def write(unit: str, start: int, values: Any) -> None:
        with lock:
            held.remove(values.size)

    monkeypatch.setattr(initialise, "_draw", counted)
    init_weights(model, two_units(model), 0, write, threads=4)
    largest = max(parameter.numel() for parameter in model.parameters())
    assert largest <= most["elements"] <= max(largest, floor // 4)
    assert 1 < most["tensors"] <= 4
