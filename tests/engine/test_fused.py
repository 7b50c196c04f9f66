"""Liger's kernels in the layers: parameters stay, every layer uses them, nothing is left behind.

Without a GPU, functions of the same names and signatures stand in for them.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from support.rig import ROWS, SEQ_LEN, VOCABULARY, reference_model, tiny_config
from transformers.models.qwen2 import modeling_qwen2

from tierstream.engine import fused

LAYERS = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of the stand-ins has run."""
    counted = Counter[str]()
    plain_rope = modeling_qwen2.apply_rotary_pos_emb

    class LigerRMSNorm:
        def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
            counted["norm"] += 1
            assert (self.offset, self.casting_mode, self.in_place, self.row_mode) == (
                0.0,
                "llama",
                True,
                None,
            )
            return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)

    class LigerSwiGLUMLP:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            counted["mlp"] += 1
            return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def liger_rotary_pos_emb(*args: Any) -> Any:
        counted["rotary"] += 1
        return plain_rope(*args)

    module = ModuleType("liger_kernel.transformers")
    module.LigerRMSNorm, module.LigerSwiGLUMLP = LigerRMSNorm, LigerSwiGLUMLP  # type: ignore[attr-defined]
    module.liger_rotary_pos_emb = liger_rotary_pos_emb  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    return counted


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


def test_every_layer_uses_them_and_parameters_stay(calls: Counter[str]) -> None:
    assert fused.liger_problem() == ""
    model = reference_model(tiny_config("qwen2", layers=LAYERS), torch.float32)
    plain = gradients(model)
    fused.fuse_layers(model)
    with fused.fused_rotary_embedding():
        assert furthest(gradients(model), plain) < 1e-5
    assert calls == {"norm": 2 * LAYERS, "mlp": LAYERS, "rotary": LAYERS}


def test_the_rotary_embedding_is_the_models_own_again(calls: Counter[str]) -> None:
    plain = modeling_qwen2.apply_rotary_pos_emb
    within = fused.fused_rotary_embedding()
    within.__enter__()
    assert modeling_qwen2.apply_rotary_pos_emb is not plain
    assert not within.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert modeling_qwen2.apply_rotary_pos_emb is plain


def test_other_models_keep_their_kernels(calls: Counter[str]) -> None:
    config = tiny_config("qwen2", layers=LAYERS)
    fused.fuse_layers(reference_model(config, torch.float32))
    gradients(reference_model(config, torch.float32))
    assert not calls


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers", raising=False)
    assert "liger_kernel" in fused.liger_problem()


@pytest.mark.gpu
def test_the_kernels_themselves_give_the_same_gradients() -> None:
    pytest.importorskip("liger_kernel")
    config = tiny_config("qwen2", layers=LAYERS, hidden_size=64, head_dim=32, intermediate_size=160)
    model = reference_model(config, torch.float32).to("cuda")
    plain = gradients(model, "cuda")
    fused.fuse_layers(model)
    with fused.fused_rotary_embedding():
        assert furthest(gradients(model, "cuda"), plain) < 1e-3
