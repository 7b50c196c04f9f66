"""From TrainingArguments of transformers and SFTConfig of TRL, as JSON."""

from __future__ import annotations

import math
from typing import Any

from tierstream.tools.convert_config.result import Conversion, Reasons
from tierstream.tools.convert_config.source import Source

_NO_COUNTERPART: Reasons = {
    "one process trains on one GPU": (
        "ddp_*", "fsdp*", "deepspeed", "local_rank", "parallelism_config*", "accelerator_config*",
        "average_tokens_across_devices", "log_on_each_node", "save_on_each_node", "log_level_replica",
        "auto_find_batch_size", "eval_use_gather_object", "use_cpu",
    ),
    "rows are read from mapped tokens, as a function of seed and step; there is no loader": (
        "dataloader_*", "remove_unused_columns", "label_names", "ignore_data_skip", "data_seed",
        "shuffle_dataset", "pad_to_multiple_of", "padding_free", "dataset_kwargs*", "length_column_name",
        "train_sampling_strategy", "group_by_length",
    ),
    "layers are always recomputed in backward; tiers.activations says where their inputs wait": (
        "gradient_checkpointing*", "activation_checkpointing*", "activation_offloading",
    ),
    "each step has a line in metrics.jsonl": (
        "logging_*", "log_level", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics",
        "include_for_metrics", "trackio_*", "debug",
        "prediction_loss_only", "batch_eval_metrics",
    ),
    "evaluation gives the loss, in the type of the model and on all rows; the lowest is the best": (
        "eval_*", "load_best_model_at_end", "do_eval", "do_predict", "bf16_full_eval", "fp16_full_eval",
        "metric_for_best_model", "greater_is_better", "per_device_eval_batch_size",
    ),
    "a checkpoint holds all state; `tierstream export` writes the model": (
        "save_only_model", "save_safetensors", "restore_callback_states_from_checkpoint",
        "enable_jit_checkpoint", "overwrite_output_dir",
    ),
    "nothing is uploaded": ("push_to_hub*", "hub_*"),
    "the budgets in tiers bound memory": ("torch_empty_cache_steps", "use_cache"),
    "a model has one type, model.dtype": ("tf32", "half_precision_backend", "fp16_opt_level"),
    "train.compile and train.kernels have no options of their own": (
        "torch_compile_*", "liger_kernel_config*", "jit_mode_eval",
    ),
    "train.deterministic is true unless the run file says otherwise": ("full_determinism",),
    "the loss is the cross-entropy of the next token": (
        "label_smoothing_factor", "neftune_noise_alpha", "loss_type",
    ),
    "the tokenizer and its template decide": ("eos_token", "pad_token"),
    "AdamW is the only optimizer": ("optim_args", "optim_target_modules"),
    "models are loaded by model.path, model.dtype and model.attention": ("model_init_kwargs*",),
    "a command of its own": ("do_train", "deepspeed_plugin"),
    "samples are cut at their end (data.too_long)": ("truncation_mode",),
}  # fmt: skip
#: lr_scheduler_type -> ours, and the share of the peak at which it ends.
_SCHEDULES: dict[str, tuple[str, float | None]] = {
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "warmup_stable_decay": ("wsd", 0.0),
}
_PLAIN: tuple[tuple[str, Any, str], ...] = (
    ("output_dir", str, "run_dir"),
    ("model_name_or_path", str, "model.path"),
    ("learning_rate", float, "optimizer.lr"),
    ("weight_decay", float, "optimizer.weight_decay"),
    ("adam_beta1", float, "optimizer.beta1"),
    ("adam_beta2", float, "optimizer.beta2"),
    ("adam_epsilon", float, "optimizer.eps"),
    ("seed", int, "train.seed"),
    ("torch_compile", bool, "train.compile"),
    ("save_total_limit", int, "checkpoint.keep"),
    ("resume_from_checkpoint", str, "checkpoint.resume"),
    ("max_length", int, "data.seq_len"),
    ("max_seq_length", int, "data.seq_len"),
    ("dataset_text_field", str, "data.text_field"),
    ("dataset_num_proc", int, "data.workers"),
    ("run_name", str, "log.name"),
)


def convert(source: Source, made: Conversion, gpus: int) -> None:
    """Bring `source` to `made`, where the DeepSpeed configuration has not said it already. Raises
    ConfigError.
    """
    for key, hint, ours in _PLAIN:
        value = source.take(key, hint)
        if value is not None:
            made.set(ours, value, key)
    micro = source.take("per_device_train_batch_size", int)
    accumulation = source.take("gradient_accumulation_steps", int) or 1
    if micro is not None:
        product = f"per_device_train_batch_size x gradient_accumulation_steps x {gpus} GPU(s)"
        made.set("train.rows_per_step", micro * accumulation * gpus, product)
        made.set("train.rows_per_chunk", micro, "per_device_train_batch_size")
    clip = source.take("max_grad_norm", float)
    if clip is not None:
        made.set("optimizer.clip_norm", clip or None, "max_grad_norm")
    _precision(source, made)
    _length(source, made)
    _schedule(source, made)
    _saving(source, made)
    _evaluation(source, made)
    _data(source, made)
    _loggers(source, made)
    optimizer = source.take("optim", str)
    if optimizer is not None and "adamw" not in optimizer:
        made.remarks.append(
            f"The optimizer is AdamW, not {optimizer}: choose its learning rate and decay anew."
        )
    made.leave_rest(_asking(source), _NO_COUNTERPART)


def _asking(source: Source) -> Source:
    """What is false or empty asks for nothing."""
    for key, value in source.settings.items():
        if value in (False, "", [], {}) or value == "no":
            source.skip(key)
    return source


def _precision(source: Source, made: Conversion) -> None:
    bf16, fp16 = source.take("bf16", bool), source.take("fp16", bool)
    if bf16 or fp16:
        made.set("model.dtype", "bfloat16", "bf16" if bf16 else "fp16; there is no float16")
    if source.take("use_liger_kernel", bool):
        made.set("train.kernels", "liger", "use_liger_kernel")


def _length(source: Source, made: Conversion) -> None:
    steps, epochs = source.take("max_steps", int), source.take("num_train_epochs", float)
    if steps is not None and steps > 0:
        made.set("train.steps", steps, "max_steps")
    elif epochs is not None and "train.steps" not in made.settings:
        made.set("train.epochs", epochs, "num_train_epochs")


def _schedule(source: Source, made: Conversion) -> None:
    kind = source.take("lr_scheduler_type", str)
    lowest = source.take("lr_scheduler_kwargs.min_lr_rate", float)
    if kind == "cosine_with_min_lr" and lowest is not None:
        made.set("optimizer.schedule", "cosine", "lr_scheduler_type")
        made.set("optimizer.min_lr_ratio", lowest, "lr_scheduler_kwargs.min_lr_rate")
    elif kind in _SCHEDULES:
        shape, ratio = _SCHEDULES[kind]
        made.set("optimizer.schedule", shape, "lr_scheduler_type")
        if ratio is not None:
            made.set("optimizer.min_lr_ratio", ratio, f"{kind} ends at 0")
    elif kind is not None:
        made.open["optimizer.schedule"] = f"lr_scheduler_type is {kind}"
    decay = source.take("lr_scheduler_kwargs.num_decay_steps", int)
    if kind == "warmup_stable_decay" and decay is not None:
        made.set("optimizer.decay_steps", decay, "lr_scheduler_kwargs.num_decay_steps")
    kwargs = source.skip("lr_scheduler_kwargs")
    if kwargs:
        made.leave("the schedules have no more options", *kwargs)
    # A share of all steps, or their number: transformers takes both in warmup_steps.
    warmup = source.take("warmup_steps", float) or source.take("warmup_ratio", float)
    if not warmup:
        return
    steps = made.settings.get("train.steps", (None, ""))[0]
    if warmup >= 1:
        made.set("optimizer.warmup_steps", int(warmup), "warmup_steps")
    elif steps is not None:
        made.set("optimizer.warmup_steps", math.ceil(warmup * steps), f"{warmup:g} of all steps")
    else:
        made.open["optimizer.warmup_steps"] = f"{warmup:g} of all steps"


def _saving(source: Source, made: Conversion) -> None:
    strategy, steps = source.take("save_strategy", str), source.take("save_steps", float)
    if strategy == "steps" and steps is not None and steps >= 1:
        made.set("checkpoint.every_steps", int(steps), "save_steps")
    elif strategy not in (None, "no"):
        made.open["checkpoint.every_steps"] = f"save_strategy is {strategy}"


def _loggers(source: Source, made: Conversion) -> None:
    loggers, project = source.take("report_to", str | list[str]), source.take("project", str)
    for name in [loggers] if isinstance(loggers, str) else loggers or []:
        if name == "tensorboard":
            made.set("log.tensorboard", True, "report_to")
        elif name == "trackio" and project is not None:
            made.set("log.trackio", project, "report_to, project")
        elif name in ("wandb", "trackio"):
            made.open[f"log.{name}"] = "report_to has it; the name of a project"
        elif name not in ("none", "all"):
            made.leave(f"there is no logger {name}", "report_to")


def _evaluation(source: Source, made: Conversion) -> None:
    strategy, steps = source.take("eval_strategy", str), source.take("eval_steps", float)
    if strategy not in (None, "no"):
        made.open["eval.files"] = f"eval_strategy is {strategy}; or eval.share, to hold some samples back"
        every = f"eval_steps is {steps:g}" if steps is not None else f"eval_strategy is {strategy}"
        made.open["eval.every_steps"] = every
        if source.take("load_best_model_at_end", bool):
            made.open["checkpoint.keep_best"] = "load_best_model_at_end: true, with an evaluation"


def _data(source: Source, made: Conversion) -> None:
    packing, strategy = source.take("packing", bool), source.take("packing_strategy", str)
    if packing is not None:
        ours = "none" if not packing else "stream" if strategy == "wrapped" else "whole"
        made.set("data.packing", ours, "packing" if not packing else f"packing, {strategy or 'bfd'}")
    if packing and strategy == "bfd_split":
        made.remarks.append(
            "With packing bfd_split TRL cuts long samples into pieces; data.too_long cuts them off."
        )
    completion, assistant = (source.take(f"{name}_only_loss", bool) for name in ("completion", "assistant"))
    if assistant or completion:
        made.set("data.train_on", "answers", "assistant_only_loss" if assistant else "completion_only_loss")
    elif completion is False:
        made.set("data.train_on", "everything", "completion_only_loss")
    elif assistant is False:
        made.remarks.append(
            "TRL trains on whole conversations unless assistant_only_loss is true; tierstream trains on the "
            "answers unless data.train_on is everything."
        )
    template = source.take("chat_template_path", str)
    if template is not None and template.endswith((".jinja", ".jinja2")):
        made.set("data.chat_template", template, "chat_template_path")
    elif template is not None:
        made.open["data.chat_template"] = f"the file with the template of {template}"
