"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to host memory, or the optimizer to a drive
(ZeRO-Infinity, arXiv 2104.07857).

Settings are those that served it best on an H200; what is not named is DeepSpeed's default. It keeps fp32
weights that begin as the rounded ones.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from tierstream.engine.model.carve import find_units
from tierstream.engine.step.batch import Batch
from tierstream.tools.bench.peers import Job
from tierstream.tools.bench.peers.child import Training, build_model, loss_of, parameter_groups, serve

#: Reading ahead and writing behind take two sets of three states and a gradient, and one more being written.
_BUFFERS = 12


def build(job: Job) -> Training:
    if job.device.startswith("cuda"):
        # For its compiler: the list that others set may hold names that it does not know ("9.0a").
        major, minor = torch.cuda.get_device_capability(job.device)
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    import deepspeed

    model = build_model(job, job.dtype)
    groups = parameter_groups(model, find_units(model).decayed(), job.optimizer["weight_decay"])
    config = settings(job)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)

    def step(batch: Batch) -> tuple[float, float | None]:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        return loss.item(), None if norm is None else float(norm)

    return Training(step, model.config.vocab_size, config, ("deepspeed",))


def settings(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    optimizer = job.optimizer
    state: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    drive: dict[str, Any] = {}
    if job.nvme_dir is not None:
        state |= {
            "device": "nvme",
            "nvme_path": job.nvme_dir,
            "buffer_count": _BUFFERS,
            "pipeline_read": True,
            "pipeline_write": True,
        }
        drive["aio"] = {
            "block_size": 8 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "overlap_events": True,
            "single_submit": False,
        }
    return {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer["clip_norm"] or 0.0,
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer["lr"],
                "betas": [optimizer["beta1"], optimizer["beta2"]],
                "eps": optimizer["eps"],
                "weight_decay": optimizer["weight_decay"],
            },
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "stage3_prefetch_bucket_size": 100_000_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": state,
        },
        **drive,
    }


if __name__ == "__main__":
    serve(build)
