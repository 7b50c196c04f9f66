"""Faster kernels in a model that transformers built: Liger's (arXiv 2410.10989), and those of torch.compile.

Both are put into the instance: modules keep their parameters, names and types, and get another `forward`.
What can only be replaced for the whole process is put back when a `with` block ends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tierstream.io.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: Families that Liger has kernels for and that are tested here, by `model_type`.
LIGER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SILU = ("silu", "swish")


def check_liger() -> None:
    """Raises ConfigError: Liger's kernels cannot be imported here."""
    try:
        import liger_kernel.ops.cross_entropy
        import liger_kernel.transformers.monkey_patch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"train.kernels is liger, and that cannot be imported ({error}); install liger-kernel >= 0.8.5, "
            "or use train.kernels: plain"
        ) from error


@contextmanager
def liger(model: Any, *, layers: bool = True) -> Iterator[None]:
    """Gives a model, on any device, `meta` included, Liger's norms, MLPs and cross-entropy (for `Head`).

    Within the block, every model of its family in this process rotates queries and keys by Liger's kernel:
    transformers finds that function among the globals of the family's module.

    Args:
        layers: False: cross-entropy alone. Layers that torch compiles must not have Liger's kernels: torch
            2.11 cannot tell what they write to, and gradients are wrong (norms 1.63 in place of 2.02, NaN).

    Raises:
        ConfigError: Liger is not here, or has no kernels for this model.
    """
    check_liger()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family, activation = model.config.model_type, model.config.hidden_act
    if family not in LIGER_FAMILIES or activation not in _SILU:
        raise ConfigError(
            f"train.kernels is liger, which is for {', '.join(LIGER_FAMILIES)} with the activation silu, and "
            f"the model is {family} with {activation}; use train.kernels: plain"
        )
    model.get_output_embeddings().loss_kernel = liger_cross_entropy_
    if not layers:
        yield
        return
    modelling = sys.modules[type(model).__module__]
    with _globals_restored(modelling):
        # Names the classes of later models anew, too, which is undone at once.
        MODEL_TYPE_TO_APPLY_LIGER_FN[family](
            model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    with _globals_restored(modelling):
        modelling.apply_rotary_pos_emb = liger_rotate  # type: ignore[attr-defined]
        yield


def liger_rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [rows, heads, tokens, head size], rotated.

    The kernel itself: Liger's own function first asks, at each call, which kernel there is.
    """
    from liger_kernel.ops.rope import LigerRopeFunction

    rotated: tuple[torch.Tensor, torch.Tensor] = LigerRopeFunction.apply(q, k, cos, sin)
    return rotated


@contextmanager
def _globals_restored(module: Any) -> Iterator[None]:
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def liger_cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, trained_tokens: int, z_coef: float
) -> torch.Tensor:
    """Losses and, in the place of the logits, their gradient: one kernel, no copy of the logits.

    The kernel is launched here and not by Liger's function, which waits for the device to count labels and
    rounds every loss to the type of the logits.

    Args:
        logits: [tokens, vocabulary], bf16 or fp32, contiguous; overwritten by the gradient of the sum of
            cross-entropy + z_coef * logsumexp(logits)^2.
        targets: int64 [tokens]; -100 where nothing is trained.
        trained_tokens: what each loss, and so the gradient, is divided by.

    Returns:
        fp32 [2, tokens]: cross-entropy and logsumexp(logits)^2; the latter 0 if `z_coef` is. Both are 0 where
        nothing is trained.
    """
    import torch
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    tokens, vocabulary = logits.shape
    losses, z_losses = both = torch.zeros(2, tokens, dtype=torch.float32, device=logits.device)
    liger_cross_entropy_kernel[(tokens,)](
        X_ptr=logits, X_stride=logits.stride(0),
        Y_ptr=targets, Y_stride=targets.stride(0),
        loss_ptr=losses, loss_stride=losses.stride(0),
        weight_ptr=None, z_loss_ptr=z_losses,
        token_accuracy_ptr=None, token_accuracy_stride=0,
        predicted_tokens_ptr=None, predicted_tokens_stride=0,
        n_cols=vocabulary, n_non_ignore=trained_tokens,
        sum_non_ignore_weight=trained_tokens, weight_sum=0.0,
        ignore_index=-100, lse_square_scale=z_coef, label_smoothing=0.0, reduction="mean", softcap=None,
        RETURN_Z_LOSS=z_coef > 0, RETURN_TOKEN_ACCURACY=False, RETURN_PREDICTED_TOKENS=False,
        HAS_WEIGHT=False, HAS_SOFTCAPPING=False, HAS_GRADIENTS=True,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (vocabulary - 1).bit_length()), num_warps=32,
    )  # fmt: skip
    if z_coef:  # the kernel gives the weighted sum, and the z-loss with its coefficient
        losses -= z_losses
        z_losses /= z_coef
    return both


def compile_layers(model: Any, *, deterministic: bool) -> None:
    """Compiles the layers' forward and backward, when they first run: once for all layers and steps, since
    weights are inputs of the compiled code, as activations are.

    There is one graph for each of: with and without gradients; the number of rows of a chunk (two, where the
    last chunk of a step is smaller); the kind of a layer's attention mask.

    Args:
        deterministic: no choice between kernels depends on a measurement, so that equal runs are equal to the
            bit.

    Raises (from the layers' forward):
        ConfigError: a layer cannot be compiled as one graph, or there is no working compiler.
    """
    import torch
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    from tierstream.engine.model.decoder import layers_of

    # `fallback_random`: dropout draws the numbers that it would draw without compiling, in recompute too.
    options: dict[str, Any] = {"fallback_random": True, "deterministic": deterministic}
    compiled = torch.compile(_layer_forward, fullgraph=True, dynamic=False, options=options)

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(layer, *args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = " ".join(str(error).split("\n")[:2]).strip()
            raise ConfigError(
                f"train.compile: torch cannot compile {type(layer).__name__}: {reason}; use train.compile: "
                "false"
            ) from error

    for layer in layers_of(model):
        layer.forward = functools.partial(forward, layer)
        layer.compiled_whole = True


def _layer_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
