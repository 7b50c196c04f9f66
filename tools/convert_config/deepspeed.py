"""From a DeepSpeed configuration. Keys, defaults and meaning: https://www.deepspeed.ai/docs/config-json/"""

from __future__ import annotations

from typing import Any, Literal

from tierstream.io.errors import ConfigError
from tierstream.tools.convert_config.result import Conversion, Reasons
from tierstream.tools.convert_config.source import Source

#: Keys that transformers may fill in, and ours that wait for the same value.
_AUTO = {
    "train_batch_size": "train.rows_per_step",
    "train_micro_batch_size_per_gpu": "train.rows_per_chunk",
    "gradient_accumulation_steps": "train.rows_per_step",
    "gradient_clipping": "optimizer.clip_norm",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.beta2",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.warmup_num_steps": "optimizer.warmup_steps",
    "scheduler.params.total_num_steps": "train.steps",
    "bf16.enabled": "model.dtype",
    "fp16.enabled": "model.dtype",
}
_NO_COUNTERPART: Reasons = {
    "what lies where follows from the byte budgets in tiers": (
        "zero_optimization.sub_group_size", "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param", "zero_optimization.offload_*.buffer_count",
        "zero_optimization.offload_*.buffer_size", "zero_optimization.offload_*.max_in_cpu",
        "zero_optimization.offload_optimizer.ratio", "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_optimizer.super_offload",
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_*_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_partition_stream_chunk_size", "zero_optimization.memory_efficient_linear",
        "zero_optimization.override_module_apply", "zero_optimization.leaf_module.*",
        "zero_optimization.save_muon_momentum_buffer_in_memory",
    ),
    "with a GPU the DRAM tier is pinned, as far as the host allows": (
        "zero_optimization.offload_*.pin_memory", "zero_optimization.cpu_offload_use_pin_memory",
    ),
    "reads run ahead and writes behind by themselves (tiers.prefetch, tiers.writeback)": (
        "zero_optimization.offload_optimizer.pipeline*",
    ),
    "measured at the start, or once by `tierstream bench --profile` (tiers.profile)": (
        "aio.block_size", "aio.queue_depth", "aio.single_submit", "aio.overlap_events", "aio.use_gds",
    ),
    "`tierstream export` writes the model for transformers": (
        "zero_optimization.stage3_gather_*_weights_on_model_save",
    ),
    "bfloat16 has the exponents of float32, so losses are not scaled": (
        "fp16.auto_cast", "fp16.loss_scale", "fp16.loss_scale_window", "fp16.initial_scale_power",
        "fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale", "fp16.fused_mode",
        "fp16.fp16_master_weights_and_grads", "bf16.immediate_grad_update", "bf16.check_grad_overflow",
        "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states",
    ),
    "a model has one type, model.dtype": ("amp.*", "torch_autocast.*"),
    "one process trains on one GPU": (
        "zero_optimization.allgather_*", "zero_optimization.reduce_*",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.overlap_comm", "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint",
        "zero_optimization.zenflow.*", "zero_optimization.ignore_unused_parameters",
        "zero_optimization.legacy_stage1", "zero_optimization.round_robin_gradients",
        "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_*",
        "zero_optimization.zeropp_loco_param.*", "zero_optimization.mics_*",
        "zero_optimization.pipeline_loading_checkpoint", "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks", "communication_data_type", "seq_parallel_comm_data_type",
        "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather",
        "fp32_allreduce", "elasticity.*", "autotuning.*", "comms_logger.*", "pipeline.*", "tensor_parallel.*",
        "use_data_before_expert_parallelism", "sequence_parallel_size", "data_parallel_size",
        "hybrid_engine.*", "nebula.*",
    ),
    "each step has a line in metrics.jsonl; train.trace_steps shows what it waits for": (
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler.*",
        "timers.*",
    ),
    "layers are always recomputed in backward; tiers.activations says where their inputs wait": (
        "activation_checkpointing.*",
    ),
    "a checkpoint holds all state, and other budgets and drives can resume it": ("checkpoint.*",),
    "a short last step of an epoch is trained on, never dropped": ("dataloader_drop_last",),
    "samples are packed on rows of one length (data.packing)": (
        "data_efficiency.*", "curriculum_learning.*", "vocabulary_size",
    ),
    "log has no more settings; metrics.jsonl is always written": (
        "tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*",
    ),
    "train.compile compiles the layers; set it by hand": ("compile.*", "graph_harvesting"),
    "AdamW is the only optimizer": ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    "weights keep their precision, and layers their number and attention": (
        "compression_training.*", "sparse_attention.*", "progressive_layer_drop.*", "eigenvalue.*",
        "quantize_training.*", "weight_quantization.*",
    ),
}  # fmt: skip

_ADAMS = {"adam", "adamw", "fusedadam", "deepspeedcpuadam"}
_Device = Literal["none", "cpu", "nvme"]


def convert(source: Source, made: Conversion, gpus: int, *, with_arguments: bool) -> None:
    """Bring all of `source` to `made`.

    Args:
        with_arguments: the program's own arguments come after; without them, what the configuration leaves to
            the program is marked.

    Raises:
        ConfigError: a value of the wrong type; sizes of batches that contradict each other.
    """
    _batch(source, made, gpus)
    _schedule(source, made, with_arguments)
    _optimizer(source, made)
    _precision(source, made)
    _offload(source, made)
    clip = source.take("gradient_clipping", float)
    if clip is not None:
        made.set("optimizer.clip_norm", clip or None, "gradient_clipping")
    elif "gradient_clipping" not in source.settings:
        made.set("optimizer.clip_norm", None, "DeepSpeed clips only where gradient_clipping says so")
    dtype = source.take("data_types.grad_accum_dtype", Literal["fp32", "fp16", "bf16"])
    if dtype is not None:
        ours = "float32" if dtype == "fp32" else "bfloat16"
        made.set("optimizer.grad_dtype", ours, "data_types.grad_accum_dtype; summed in float32 in any case")
    if source.take("tensorboard.enabled", bool):
        made.set("log.tensorboard", True, "tensorboard.enabled")
    if source.take("wandb.enabled", bool):
        made.set("log.wandb", source.take("wandb.project", str) or "deepspeed", "wandb.project")
    made.set("train.device", "cuda", "the first GPU")
    made.leave_rest(source, _NO_COUNTERPART)


def leave_open(source: Source, made: Conversion) -> None:
    """Mark what was "auto" and has found no value."""
    for key in source.auto:
        ours = _AUTO.get(key)
        if ours is not None and ours not in made.settings:
            made.open[ours] = f'{key} is "auto"'
    if "data.seq_len" not in made.settings:
        made.open["data.seq_len"] = "tokens of a row"
    if not {"train.steps", "train.epochs"} & made.settings.keys():
        made.open["train.steps"] = "without steps and epochs, one epoch"


def _batch(source: Source, made: Conversion, gpus: int) -> None:
    micro = source.take("train_micro_batch_size_per_gpu", int)
    accumulation = source.take("gradient_accumulation_steps", int)
    whole = source.take("train_batch_size", int)
    for key, value in (
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", accumulation),
        ("train_batch_size", whole),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{source.name}: {key} is {value}; it must be >= 1")
    if whole is not None:
        if whole % ((micro or 1) * (accumulation or 1)):
            raise ConfigError(
                f"{source.name}: train_batch_size is {whole}, which is no multiple of train_micro_batch_size_"
                f"per_gpu ({micro or 1}) x gradient_accumulation_steps ({accumulation or 1})"
            )
        made.set("train.rows_per_step", whole, "train_batch_size")
    elif micro is not None and "gradient_accumulation_steps" not in source.auto:
        rows = micro * (accumulation or 1) * gpus
        made.set("train.rows_per_step", rows, f"micro batch x accumulation x {gpus} GPU(s)")
    if micro is not None:
        made.set("train.rows_per_chunk", micro, "train_micro_batch_size_per_gpu")


def _schedule(source: Source, made: Conversion, with_arguments: bool) -> None:
    kind, params = source.take("scheduler.type", str), "scheduler.params."
    if kind is None:
        if not with_arguments and not source.has("scheduler"):
            made.set("optimizer.schedule", "constant", "no scheduler here; perhaps the program made one?")
        return
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in shapes:
        made.leave(f"scheduler {kind} has none; choose optimizer.schedule", "scheduler.type")
        made.open["optimizer.schedule"] = f"scheduler.type is {kind}"
        return
    made.set("optimizer.schedule", shapes[kind], f"scheduler.type {kind}")
    warmup = source.take(f"{params}warmup_num_steps", int)
    if f"{params}warmup_num_steps" not in source.settings:
        made.set("optimizer.warmup_steps", 1000, "DeepSpeed's default")
    elif warmup is not None:
        made.set("optimizer.warmup_steps", warmup, f"{params}warmup_num_steps")
    if source.take(f"{params}warmup_type", Literal["log", "linear"]) != "linear":
        made.remarks.append("The learning rate warms up linearly, not as the logarithm of the step.")
    steps = source.take(f"{params}total_num_steps", int)
    if steps is not None:
        made.set("train.steps", steps, f"{params}total_num_steps")
    if kind == "WarmupCosineLR":
        lowest = source.take(f"{params}cos_min_ratio", float)
        if lowest is not None:
            made.set("optimizer.min_lr_ratio", lowest, f"{params}cos_min_ratio")
        elif f"{params}cos_min_ratio" not in source.settings:
            made.set("optimizer.min_lr_ratio", 1e-4, "DeepSpeed's default of cos_min_ratio")
        begin = source.take(f"{params}warmup_min_ratio", float)
    else:
        if kind == "WarmupDecayLR":
            made.set("optimizer.min_lr_ratio", 0.0, "WarmupDecayLR ends at 0")
        begin = source.take(f"{params}warmup_min_lr", float)
        peak = source.take(f"{params}warmup_max_lr", float)
        if peak is not None:
            made.set("optimizer.lr", peak, f"{params}warmup_max_lr")
        elif f"{params}warmup_max_lr" not in source.settings:
            made.set("optimizer.lr", 1e-3, "DeepSpeed's default of warmup_max_lr")
    if begin:
        made.remarks.append(f"The learning rate warms up from 0, not from {begin:g}.")
    source.take(f"{params}last_batch_iteration", int)


def _optimizer(source: Source, made: Conversion) -> None:
    kind, params = source.take("optimizer.type", str), "optimizer.params."
    if kind is None:
        return
    coupled = source.take(f"{params}adam_w_mode", bool) is False and kind.lower() != "adamw"
    if kind.lower() not in _ADAMS or coupled:
        name = "Adam with coupled weight decay" if coupled else kind
        made.remarks.append(f"The optimizer is AdamW, not {name}: choose its learning rate and decay anew.")
        made.leave("AdamW is the only optimizer", "optimizer.type", *source.skip(params))
        return
    decay = 0.01 if source.take(f"{params}torch_adam", bool) and kind.lower() == "adamw" else 0.0
    betas = source.take(f"{params}betas", list[float])
    if betas is not None and len(betas) != 2:
        raise ConfigError(f"{source.name}: {params}betas is {betas}; it must be two numbers")
    if betas is None and f"{params}betas" not in source.settings:
        made.set("optimizer.beta2", 0.999, "DeepSpeed's default")
    elif betas is not None:
        made.set("optimizer.beta1", betas[0], f"{params}betas")
        made.set("optimizer.beta2", betas[1], f"{params}betas")
    defaults: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": decay}
    for name, default in defaults.items():
        value = source.take(params + name, float)
        if value is not None:
            made.set(f"optimizer.{name}", value, params + name)
        elif params + name not in source.settings:
            made.set(f"optimizer.{name}", default, "DeepSpeed's default")
    for flag in ("bias_correction", "amsgrad"):
        if source.take(params + flag, bool) is (flag == "amsgrad"):
            made.leave("AdamW is torch.optim.AdamW with its defaults", params + flag)


def _precision(source: Source, made: Conversion) -> None:
    name = "bfloat16" if source.has("bfloat16") else "bf16"
    bf16, fp16 = source.take(f"{name}.enabled", bool), source.take("fp16.enabled", bool)
    if bf16:
        made.set("model.dtype", "bfloat16", f"{name}.enabled")
    elif fp16:
        made.set("model.dtype", "bfloat16", "fp16.enabled; there is no float16")
    elif not {f"{name}.enabled", "fp16.enabled"} & set(source.auto):
        made.set("model.dtype", "float32", "neither bf16 nor fp16 is enabled")


def _offload(source: Source, made: Conversion) -> None:
    """Their offload device is where ours keeps all of the state: weights, masters and moments alike."""
    directories: dict[str, str] = {}
    devices = set[str]()
    if source.take("zero_optimization.stage", Literal[0, 1, 2, 3]) is not None:
        made.leave("what lies where follows from the byte budgets in tiers", "zero_optimization.stage")
    for part in ("offload_param", "offload_optimizer"):
        prefix = f"zero_optimization.{part}."
        device = source.take(f"{prefix}device", _Device)
        path = source.take(f"{prefix}nvme_path", str)
        if device is not None:
            devices.add(device)
        if device == "nvme":
            if path is None:
                raise ConfigError(
                    f"{source.name}: {prefix}device is nvme; {prefix}nvme_path must name a directory"
                )
            directories.setdefault(path, f"{prefix}nvme_path")
        elif path is not None:
            made.leave(f"it is used with device nvme, and the device is {device}", f"{prefix}nvme_path")
    if directories:
        made.set("tiers.nvme_dirs", list(directories), " and ".join(directories.values()))
        made.open["tiers.dram"] = "bytes of host memory, such as 64 GiB; without it 70 % of what is free"
    elif "cpu" in devices:
        made.set("tiers.nvme_dirs", None, "offload to cpu: the state lives in DRAM")
    else:
        made.remarks.append("Nothing is offloaded: tiers.gpu may hold the whole state, such as 70 GiB.")
    threads = source.take("aio.thread_count", int) or source.take("aio.intra_op_parallelism", int)
    if threads is not None:
        made.set("tiers.io_threads", threads, "aio.thread_count")
