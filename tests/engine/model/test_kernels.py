"""Liger's kernels in a model: parameters stay, every layer uses them, nothing is left behind.

Without a GPU, functions of the same names and signatures stand in for them.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.loss_kernel import torch_cross_entropy_
from support.rig import ROWS, SEQ_LEN, VOCABULARY, Setup, batches, reference_model, rig, tiny_config

from tierstream.engine.config import TrainConfig
from tierstream.engine.model import kernels
from tierstream.io.errors import ConfigError

LAYERS = 3


class StandIn:
    """The parts of liger_kernel that are used, over torch; counts how often each of them runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = Counter[str]()
        names = ("", ".ops", ".ops.cross_entropy", ".ops.rope", ".transformers", ".transformers.monkey_patch")
        modules = {name: ModuleType(f"liger_kernel{name}") for name in names}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"liger_kernel{name}", module)
        modules[".ops.rope"].LigerRopeFunction = SimpleNamespace(apply=self._rotate)  # type: ignore[attr-defined]
        apply = dict.fromkeys(("gemma", *kernels.LIGER_FAMILIES), self._apply)
        modules[".transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN = apply  # type: ignore[attr-defined]

    def _apply(
        self, model: Any, *, rope: bool, cross_entropy: bool, fused_linear_cross_entropy: bool
    ) -> None:
        assert (rope, cross_entropy, fused_linear_cross_entropy) == (False, False, False)
        modelling = sys.modules[type(model).__module__]
        for name in [n for n in vars(modelling) if n.endswith(("RMSNorm", "MLP"))]:
            setattr(modelling, name, None)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(self._norm(), module)
            elif type(module).__name__.endswith("MLP"):
                module.forward = MethodType(self._mlp(), module)

    def _norm(self) -> Any:
        def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
            self.calls["norm"] += 1
            return torch.nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

        return forward

    def _mlp(self) -> Any:
        def forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
            self.calls["mlp"] += 1
            return mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))

        return forward

    def _rotate(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        self.calls["rotary"] += 1
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            half = x.shape[-1] // 2
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

        return rotated(q), rotated(k)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(kernels, "liger_cross_entropy_", torch_cross_entropy_)
    return StandIn(monkeypatch)


def gradients(model: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (ROWS, SEQ_LEN), generator=generator).to(device)
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a gradient."""
    assert list(ours) == list(theirs)
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in ours)


@pytest.mark.parametrize("family", kernels.LIGER_FAMILIES)
def test_every_layer_uses_them_and_parameters_stay(family: str, stand_in: StandIn) -> None:
    model = reference_model(tiny_config(family, layers=LAYERS), torch.float32)
    plain, types = gradients(model), [type(module) for module in model.modules()]
    with kernels.liger(model):
        assert furthest(gradients(model), plain) < 1e-5
    assert [type(module) for module in model.modules()] == types
    norms = (4 if family == "qwen3" else 2) * LAYERS + 1
    assert stand_in.calls == {"norm": norms, "mlp": LAYERS, "rotary": LAYERS}


def test_the_family_is_its_own_again(stand_in: StandIn) -> None:
    """Within, only the rotary embedding is another; afterwards nothing is, also when the run has failed."""
    config = tiny_config("qwen2", layers=LAYERS)
    model, other = (reference_model(config, torch.float32) for _ in range(2))
    modelling = sys.modules[type(model).__module__]
    before = dict(vars(modelling))
    with kernels.liger(model):
        inner = kernels.liger(other)
        inner.__enter__()
        changed = {name for name in before if getattr(modelling, name) is not before[name]}
        assert changed == {"apply_rotary_pos_emb"}
        with pytest.raises(KeyboardInterrupt):
            inner.gen.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert vars(modelling) == before
    gradients(reference_model(config, torch.float32))
    assert not stand_in.calls


def test_layers_that_are_compiled_stay_as_they_are(stand_in: StandIn) -> None:
    """The loss alone is Liger's."""
    model = reference_model(tiny_config("qwen3"), torch.float32)
    layer, modelling = model.model.layers[0], sys.modules[type(model).__module__]
    before, globals_before = layer.mlp.forward, dict(vars(modelling))
    with kernels.liger(model, layers=False):
        assert layer.mlp.forward == before
        assert vars(modelling) == globals_before
        assert model.get_output_embeddings().loss_kernel is kernels.liger_cross_entropy_


@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_model_trains_with_them(tied: bool, stand_in: StandIn) -> None:
    """Put into the model on `meta`, norms of the head and its loss included; all in fp32."""
    setup = Setup(config=tiny_config("qwen3", tied=tied), rows_per_chunk=2)
    with rig(setup) as run:
        plain = run.train(batches(3))
    entered: list[Any] = []

    def prepare(model: Any) -> None:
        entered.append(kernels.liger(model))
        entered[0].__enter__()

    with rig(setup.but(prepare=prepare)) as run:
        fused = run.train(batches(3))
        entered[0].__exit__(None, None, None)
    assert [o.loss for o in fused] == pytest.approx([o.loss for o in plain], rel=1e-5)
    assert [o.verdict.grad_norm for o in fused] == pytest.approx(
        [o.verdict.grad_norm for o in plain], rel=1e-4
    )
    assert stand_in.calls["rotary"] == 3 * 2 * 3 * LAYERS  # steps, with the recompute, chunks


@pytest.mark.parametrize(
    ("family", "other", "said"),
    [("qwen3", {"hidden_act": "gelu"}, "qwen3 with gelu"), ("gemma", {}, "gemma with gelu_pytorch_tanh")],
)
def test_other_models_are_refused(family: str, other: Any, said: str, stand_in: StandIn) -> None:
    if family == "gemma":
        import transformers

        model = reference_model(
            transformers.GemmaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=1, num_key_value_heads=1, head_dim=16,
            ),
            torch.float32,
        )  # fmt: skip
    else:
        model = reference_model(tiny_config(family, **other), torch.float32)
    with pytest.raises(ConfigError, match=said), kernels.liger(model):
        pass


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("liger_kernel.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"liger_kernel.*install liger-kernel.*train.kernels: plain"):
        kernels.check_liger()


def test_they_are_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"train.kernels is liger and train.device is cpu"):
        TrainConfig(kernels="liger")
    TrainConfig(kernels="liger", device="cuda:1")


@pytest.mark.parametrize(
    ("vocabulary", "tokens"), [(259, 1_036_416), (151_936, 1664), (1 << 22, 64), (1 << 29, 1)]
)
def test_a_chunk_of_the_loss_follows_from_the_vocabulary(vocabulary: int, tokens: int) -> None:
    assert TrainConfig().loss_chunk(vocabulary) == tokens
    assert TrainConfig(loss_chunk_tokens=7).loss_chunk(vocabulary) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("family", kernels.LIGER_FAMILIES)
def test_the_kernels_themselves_give_the_same_gradients(family: str) -> None:
    pytest.importorskip("liger_kernel")
    config = tiny_config(family, layers=LAYERS, hidden_size=64, head_dim=32, intermediate_size=160)
    model = reference_model(config, torch.float32).to("cuda")
    plain = gradients(model, "cuda")
    with kernels.liger(model):
        assert furthest(gradients(model, "cuda"), plain) < 1e-3
