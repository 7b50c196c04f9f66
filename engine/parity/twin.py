"""A tiny model of the architecture of a large one: the same classes, flags and kinds of layers, in sizes that
compute in no time.

What a configuration calls its sizes is known by patterns over the names that families use. Sizes that do not
fit each other make the family's own code fail when the twin is built; nothing else can go wrong unseen.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch

#: Tokens of a twin.
VOCABULARY = 160
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
#: Pattern of a whole name -> the largest value that a twin has. 0 and None stay: such a part is not there.
_LARGEST = {
    r"(\w+_)?vocab_size(_\w+)?": VOCABULARY,
    r"hidden_size|d_model|n_embd|dim_model|(\w*embed|emb|embedding)_dim|(\w+_)?embedding_size"
    r"|word_embed_proj_dim|attention_hidden_size|lru_width": _HIDDEN,
    r"(\w+_)?attention_heads|n_heads?|num_heads|linear_num_(value_)?heads": _HEADS,
    r"(\w+_)?(key_value_heads|kv_heads|query_groups)|linear_num_key_heads|index_n_heads": 2,
    r"mamba_(n|num)_heads|n_mamba_heads": 2 * _HIDDEN // _HEAD_DIM,
    r"mamba_d_ssm": 2 * _HIDDEN,
    r"qk_head_dim": 2 * _HEAD_DIM,
    r"(\w+_)?(head_dim|head_size|headdim|d_head|dim_head)|kv_channels|rotary_dim|query_pre_attn_scalar"
    r"|(\w+_)?(lora_|low|gate_|norm_|adapter_|dt_|step_|laurel_)?rank|d_rel|router_hidden_size"
    r"|hidden_size_per_layer_input|moe_latent_size|(mamba_d_|ssm_)?state(_size)?": _HEAD_DIM,
    r"(\w+_)?(moe|expert|experts)_(\w+_)?(intermediate|hidden)_size": 32,
    r"(\w+_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|(\w+_)?ffn_dim|d_ff|dff|dim_ff|n_inner"
    r"|d_inner": 96,
    r"(\w+_)?(num|n)_(routed_|local_)?experts|zero_expert_num": 8,
    r"(\w+_)?experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|(\w+_)?shared_experts|n_group"
    r"|num_expert_group|o_groups|(mamba_)?n_?groups": 2,
    r"topk_group|num_nextn_predict_layers": 1,
    r"(\w+_)?window(_size)?|attention_chunk_size|local_attention": 6,
    r"index_topk(_blocks)?|index_block_size": 4,
    r"(mamba_)?chunk_size": 8,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length": 512,
    r"original_max_position_embeddings": 128,
}  # fmt: skip
#: What no text goes through, and what is no part of the architecture.
_LEFT_ALONE = re.compile(r"(vision|audio|vq)_\w+|id2label|label2id")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Counts of the layers of a kind that are the first, or the last; lists of the numbers of those of a kind.
_FIRST, _LAST = ("first_k_dense_replace", "num_dense_layers"), ("num_kv_shared_layers",)
_NUMBERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "hybrid_layer_ids", "ple_layer_ids")
_PERIODS = re.compile(r"\w+_(period|interval|step|every_n_layers)")
_LAYERS_MIN, _LAYERS_MAX = 3, 9


def tiny_config(config: Any) -> Any:
    """The configuration of the twin, of the same class. `config` is not changed."""
    values = copy.deepcopy(config.to_dict())
    _shrink(values)
    twin = type(config).from_dict(values)
    twin.name_or_path = config.name_or_path  # where code of its own lies
    return twin


def randomise(model: Any, seed: int = 1) -> None:
    """Fills parameters and persistent buffers so that nothing is zero, or uniform, by accident: each by its
    own size and type."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and not name.endswith("_bias"):
                parameter.copy_(values * 0.6 / max(parameter.shape[-1], 4) ** 0.5)
            else:
                parameter.add_(values * 0.1)
        stored = model.state_dict()
        for name, buffer in sorted(model.named_buffers()):
            if name in stored and buffer.is_floating_point():
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)


def _shrink(values: dict[str, Any]) -> None:
    """A configuration, or one inside it."""
    depth_key = next((key for key in _DEPTHS if type(values.get(key)) is int), None)
    if depth_key is not None:
        _choose_layers(values, depth_key)
    as_many_keys = {  # heads that share no keys
        key for key, value in values.items()
        if re.fullmatch(r"\w*(key_value|kv)_heads", key) and value in (
            values.get("num_attention_heads"), values.get("n_heads"))
    }  # fmt: skip
    for key, value in values.items():
        if _LEFT_ALONE.fullmatch(key):
            continue
        if isinstance(value, dict):
            _shrink(value)
        elif re.search(r"_token_(id|index)$", key):
            values[key] = _token(value)
        elif isinstance(value, list):
            values[key] = [_smaller(key, item) for item in value]
        else:
            values[key] = _HEADS if key in as_many_keys else _smaller(key, value)
    if "expand" in values or "mamba_expand" in values:
        _shrink_state_space(values)
    _shrink_rotary(values)


def _shrink_state_space(values: dict[str, Any]) -> None:
    """Heads by their size is what the layers are wide, `expand` times the hidden size."""
    width = _HIDDEN * (values.get("expand") or values["mamba_expand"])
    if values.get("mamba_d_ssm"):
        values["mamba_d_ssm"] = width
    names = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"),
             ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))  # fmt: skip
    for heads, size in names:
        if heads in values and size in values:
            values[heads], values[size] = width // _HEAD_DIM, _HEAD_DIM


def _smaller(key: str, value: Any) -> Any:
    if type(value) is not int:
        return value
    fitting = (largest for pattern, largest in _LARGEST.items() if re.fullmatch(pattern, key))
    return min(value, next(fitting, value))


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(item) for item in value]
    return value % VOCABULARY if type(value) is int else value


def _choose_layers(values: dict[str, Any], depth_key: str) -> None:
    """Few layers, with one of each kind that the configuration tells of, in their order."""
    depth = values[depth_key]
    of_layers = [key for key, value in values.items()
                 if isinstance(value, list) and len(value) == depth and key not in _NUMBERS]  # fmt: skip
    counted = [key for key in (*_FIRST, *_LAST) if type(values.get(key)) is int]
    listed = [key for key in _NUMBERS if isinstance(values.get(key), list)]

    def is_counted(key: str, layer: int) -> bool:
        return layer < values[key] if key in _FIRST else layer >= depth - values[key]

    def kind(layer: int) -> tuple[str, ...]:
        return tuple(repr(value) for value in (
            *(values[key][layer] for key in of_layers),
            *(is_counted(key, layer) for key in counted),
            *(layer in values[key] for key in listed),
        ))  # fmt: skip

    periods = (value for key, value in values.items() if _PERIODS.fullmatch(key) and type(value) is int)
    fewest = min(depth, max([_LAYERS_MIN, *(period + 1 for period in periods)]), _LAYERS_MAX)
    firsts = {kind(layer): layer for layer in reversed(range(depth))}
    chosen = sorted(firsts.values())[:_LAYERS_MAX]
    more = [layer for layer in range(depth) if layer not in chosen]
    chosen = sorted([*chosen, *more[: max(0, fewest - len(chosen))]])
    for key in of_layers:
        values[key] = [values[key][layer] for layer in chosen]
    for key in counted:
        values[key] = sum(is_counted(key, layer) for layer in chosen)
    for key in listed:
        values[key] = [at for at, layer in enumerate(chosen) if layer in values[key]]
    if isinstance(values.get("per_layer_config"), dict):
        own = {int(layer): settings for layer, settings in values["per_layer_config"].items()}
        values["per_layer_config"] = {str(at): own[layer] for at, layer in enumerate(chosen) if layer in own}
    values[depth_key] = len(chosen)


def _shrink_rotary(values: dict[str, Any]) -> None:
    """Lists that have a number for each pair of dimensions that are turned, or that share these out."""
    pairs = int(_HEAD_DIM * (values.get("partial_rotary_factor") or 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if isinstance(values.get(key), list):
            values[key] = values[key][:pairs]
    for key in ("mrope_section", "xdrope_section"):
        if isinstance(values.get(key), list) and sum(values[key]):
            shares = [share * pairs // sum(values[key]) for share in values[key]]
            values[key] = [shares[0] + pairs - sum(shares), *shares[1:]]
