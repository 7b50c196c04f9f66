"""Fused kernels of Liger (arXiv 2410.10989) in the layers of a model, where it is installed: RMSNorm, SwiGLU
and rotary embedding. To measure with; training itself uses the model's own code.

Modules get another `forward`, on the instance: their parameters, names and types stay. The final norm stays
as it is, since the head runs it by the forward of its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any


def liger_problem() -> str:
    """Why the kernels cannot be used here; empty: they can."""
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def fuse_layers(model: Any) -> None:
    """Fused norms and MLPs in every layer of a Qwen2 model, on any device, `meta` included."""
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP

    for layer in model.get_decoder().layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.offset, norm.casting_mode, norm.in_place, norm.row_mode = 0.0, "llama", True, None
            norm.forward = MethodType(LigerRMSNorm.forward, norm)
        layer.mlp.forward = MethodType(LigerSwiGLUMLP.forward, layer.mlp)


@contextmanager
def fused_rotary_embedding() -> Iterator[None]:
    """Within, Qwen2 models of this process rotate queries and keys by the fused kernel."""
    from liger_kernel.transformers import liger_rotary_pos_emb
    from transformers.models.qwen2 import modeling_qwen2

    plain = modeling_qwen2.apply_rotary_pos_emb
    modeling_qwen2.apply_rotary_pos_emb = liger_rotary_pos_emb
    try:
        yield
    finally:
        modeling_qwen2.apply_rotary_pos_emb = plain
