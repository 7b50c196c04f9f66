"""The model as transformers builds it, without memory: parameters on `meta`, buffers computed on demand."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.frozen import freeze
from tierstream.io.errors import ConfigError, ModelSourceError

if TYPE_CHECKING:
    import torch

    from tierstream.engine.weights.source import LoadPlan

#: Modules of families, those that a directory brings along among them.
_CODE_OF_FAMILIES = re.compile(r"transformers\.models\.(?!auto\.)|transformers_modules\.")
_OUR_CODE = re.compile(r"tierstream\.")


def build_meta_model(config: ModelConfig) -> tuple[Any, Any]:
    """Build the causal language model of `config` on the meta device, in training mode; parameters that are
    not trained do not require gradients.

    Returns:
        `(model, model.config)`. Nothing is downloaded, and no code from the model directory is run unless
        `config.trust_remote_code` says so.

    Raises:
        ModelSourceError: no readable configuration, a quantised model (but for FP8 and MXFP4, which are built
            as if they were none), or one that is not a causal decoder.
        ConfigError: the family does not have the attention implementation that was asked for, or its scores
            are capped, which sdpa leaves out; dropout in attention with sinks; too few rows for a special
            token; see `freeze`.
    """
    model, hf_config = build_of(read_hf_config(config), config)
    freeze(model, config)
    return model, hf_config


def build_of(hf_config: Any, config: ModelConfig) -> tuple[Any, Any]:
    """`build_meta_model` of a transformers configuration that is there already; nothing is frozen."""
    from tierstream.engine.model import sink_attention

    sink_attention.register()
    attention: str = config.attention
    # Torch's own attention has no caps: transformers 5.17 leaves them out without a word.
    caps = getattr(hf_config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if attention == "sdpa" and caps is not None:
        raise ConfigError(
            f"model.attention='sdpa' caps no scores, and {type(hf_config).__name__} has "
            f"attn_logit_softcapping {caps}; leave model.attention to auto"
        )
    if attention == "auto":
        model = _build(hf_config, config, "eager")  # which all families have
        plain = "sdpa" if model._supports_sdpa and caps is None else "eager"
        attention = sink_attention.NAME if sink_attention.has_sinks(model) else plain
    model = _build(hf_config, config, attention)
    if attention == sink_attention.NAME:
        if not sink_attention.has_sinks(model):
            raise ConfigError(
                f"model.attention={attention!r} is for decoders with sinks in causal attention, which "
                f"{type(model).__name__} has not; leave model.attention to auto"
            )
        sink_attention.check_dropout(model.config.attention_dropout)
    for module_name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            # A router's correction bias: from_pretrained keeps it in fp32, from_config not in every version.
            if buffer is not None and is_kept_in_fp32(model, f"{module_name}.{key}", model.dtype):
                module._buffers[key] = buffer.float()
    return model.train(), model.config


def is_kept_in_fp32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether the family of a model in `dtype` keeps this parameter or buffer in fp32 (routers)."""
    # Patterns, read as transformers reads them.
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in model._get_dtype_plan(dtype))


def _build(hf_config: Any, config: ModelConfig, attention: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, initialization

    try:
        with torch.device("meta"), initialization.meta_device_safe_creation_ops():
            return AutoModelForCausalLM.from_config(
                hf_config,
                dtype=getattr(torch, config.dtype),
                attn_implementation=attention,
                trust_remote_code=config.trust_remote_code,
            )
    except Exception as error:  # the code of a family raises what it likes
        kind = type(hf_config).__name__
        if config.attention == "auto":
            what = "config.json or its code" if config.trust_remote_code else "config.json"
            raise ModelSourceError(
                f"{config.path or config.config}: transformers cannot build a model of {kind}: "
                f"{describe(error)}; correct its {what}"
            ) from error
        raise ConfigError(
            f"model.attention={attention!r} cannot be used with {kind}: transformers has no such attention "
            "for it; leave model.attention to auto"
        ) from error


def describe(error: Exception) -> str:
    """What was raised, in a line, and where: in the code of a family, else in ours."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    frames = [(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
              for frame, line in traceback.walk_tb(error.__traceback__)]  # fmt: skip
    for code in (_CODE_OF_FAMILIES, _OUR_CODE):
        for module, file, line in reversed(frames):
            if code.match(module):
                return f"{text} ({Path(file).name}:{line})"
    return text


def read_hf_config(config: ModelConfig, *, named: str | None = None) -> Any:
    """The transformers configuration of a model that can be trained here; see `build_meta_model` for the
    errors.

    Args:
        named: what the user gave the directory as, for messages; None: `model.path` or `model.config`.
    """
    from transformers import AutoConfig

    file = Path(config.path or config.config or "")
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        key = named or f"model.{'path' if config.path else 'config'}"
        remedy = f"{key} must be a local directory with a config.json (names on the hub are not looked up)"
        if snapshots := list(file.parent.glob("snapshots/*/config.json")):  # models--OWNER--NAME
            newest = max(snapshots, key=lambda found: found.stat().st_mtime).parent
            remedy = f"this is one of the hub's cache, whose models lie below it: set {key} to {newest}"
        raise ModelSourceError(f"{file} does not exist; {remedy}")
    trusted = config.trust_remote_code
    try:  # modules are looked for beside the config.json of a directory
        where = config.code_dir if config.code_dir and file.name == "config.json" else file
        hf_config = AutoConfig.from_pretrained(str(where), local_files_only=True, trust_remote_code=trusted)
    except Exception as error:  # transformers raises whatever its many configuration classes do
        if not trusted and (module := _own_module(file)) is not None:
            raise ModelSourceError(
                f"{file}: transformers does not have this architecture, and its directory brings code of its "
                f"own ({module}); read that code, and set model.trust_remote_code to true if it may run"
            ) from error
        first, *more = str(error).strip().splitlines() or [repr(error)]
        reason = f"{first} {more[0].strip()}" if first.endswith(":") and more else first
        raise ModelSourceError(f"{file} is no configuration that transformers can read: {reason}") from error
    check_decoder(hf_config, trusted, str(file))
    if getattr(hf_config, "quantization_config", None) is not None:
        method = dict(hf_config.quantization_config).get("quant_method", "unknown")
        if method not in ("fp8", "mxfp4"):
            raise ModelSourceError(
                f"{file}: the weights are quantised ({method}); training needs a bf16, fp16, fp32, fp8 or "
                "mxfp4 version of this model"
            )
        # Loading dequantises: what is trained and exported is not quantised.
        del hf_config.quantization_config
    if config.vocab_size is not None:
        _resize_vocabulary(hf_config, config.vocab_size, file)
    return hf_config


def check_decoder(hf_config: Any, trust_remote_code: bool, where: str) -> None:
    """Raises ModelSourceError, which begins with `where`: transformers makes no decoder for texts of this
    configuration.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind, known = type(hf_config).__name__, MODEL_FOR_CAUSAL_LM_MAPPING
    if hf_config.is_encoder_decoder or getattr(hf_config, "is_decoder", True) is False:
        raise ModelSourceError(
            f"{where}: {kind} is not a causal decoder; encoders and encoder-decoders cannot be trained"
        )
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {}):
        return
    text_config = hf_config.get_text_config(decoder=True)
    model_class: Any = known.get(type(hf_config), None)
    of_text = getattr(model_class, "config_class", None) is type(text_config)
    if text_config is not hf_config and not of_text:
        remedy = "transformers has no causal language model for its texts alone"
        if type(text_config) in known:
            remedy = "save its text model alone and train that (docs/how-to/own-model.md shows how)"
        raise ModelSourceError(f"{where}: {kind} is of a model for more than texts; {remedy}")
    if model_class is None:
        raise ModelSourceError(f"{where}: transformers has no causal language model for {kind}")


def _own_module(file: Path) -> str | None:
    """The module that a config.json names for its configuration; None: it names none."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        name = json.loads(file.read_text(encoding="utf-8"))["auto_map"]["AutoConfig"]
        return f"{name.rpartition('.')[0]}.py"
    return None


def _resize_vocabulary(hf_config: Any, rows: int, file: Path) -> None:
    """Let the model be built with so many rows. Raises ConfigError if a special token would have none, or
    another table of the model keeps the rows that it has.
    """
    text_config = hf_config.get_text_config(decoder=True)
    if others := [key for key in text_config.to_dict() if key.startswith("vocab_size_")]:
        raise ConfigError(
            f"model.vocab_size is {rows}, but the model in {file} has a second table of tokens "
            f"({others[0]}), which is not resized; leave model.vocab_size out"
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(text_config, key, None)
        lost = [i for i in (value if isinstance(value, list) else [value]) if i is not None and i >= rows]
        if lost:
            raise ConfigError(
                f"model.vocab_size is {rows}, but {key} in {file} is {lost[0]}; give at least "
                f"{max(lost) + 1} rows, or correct the config.json"
            )
    text_config.vocab_size = rows


def materialise_buffers(model: Any, plan: LoadPlan | None, device: str | torch.device) -> None:
    """Give every buffer of a meta model real memory on `device`.

    Persistent buffers get the stored values of `plan`. All others are computed by the family's own
    `_init_weights`, found at the nearest enclosing transformers model as `from_pretrained` does. That
    function draws parameters too (gemma keeps a buffer and the embedding matrix in one module), hence
    `protected`.

    Raises:
        ModelSourceError: a buffer that neither the checkpoint nor the family's code fills.
    """
    import torch
    from transformers import initialization

    with torch.no_grad(), initialization.guard_torch_init_functions(), protected(model.parameters()):
        for name, module in model.named_modules():
            computed = []
            for key, buffer in module._buffers.items():
                full_name = f"{name}.{key}" if name else key
                if buffer is None or not buffer.is_meta:
                    continue
                if plan is not None and full_name in plan.buffers:
                    module._buffers[key] = plan.read_tensor(plan.buffers[full_name]).to(device, buffer.dtype)
                    module._buffers[key]._is_hf_initialized = True
                    continue
                fresh = torch.empty_like(buffer, device=device)
                module._buffers[key] = fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh.zero_()
                computed.append((full_name, module._buffers[key]))
            if computed:
                nearest_pretrained(model, name)._init_weights(module)
            for full_name, buffer in computed:
                if buffer.is_floating_point() and bool(buffer.isnan().any()):
                    raise ModelSourceError(
                        f"{type(model).__name__} leaves its buffer {full_name} without a value"
                    )


def nearest_pretrained(model: Any, module_name: str) -> Any:
    """The innermost transformers model around a module: its `_init_weights` is the one that knows the
    module's sizes."""
    from transformers import PreTrainedModel

    found, module = model, model
    for part in module_name.split(".") if module_name else ():
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            found = module
    return found


@contextmanager
def protected(parameters: Iterable[Any]) -> Iterator[None]:
    """Within, the init functions of transformers and torch leave these parameters alone (transformers' own
    flag)."""
    flagged = [p for p in parameters if not getattr(p, "_is_hf_initialized", False)]
    for parameter in flagged:
        parameter._is_hf_initialized = True
    try:
        yield
    finally:
        for parameter in flagged:
            del parameter._is_hf_initialized
