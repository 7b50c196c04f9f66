"""PyTorch's own way: fully sharded data parallelism on one device with `CPUOffloadPolicy`. Parameters,
gradients and moments live in host memory in fp32; layers are copied to the device and cast there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.decoder import layers_of
from tierstream.engine.step.batch import Batch
from tierstream.tools.bench.peers import Job
from tierstream.tools.bench.peers.child import Training, build_model, loss_of, parameter_groups, serve


def build(job: Job) -> Training:
    device = torch.device(job.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device.index or 0)
    # gloo too: the norm of gradients that lie in host memory is summed there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    model = build_model(job, "float32")
    decayed = find_units(model).decayed()
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if job.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy(pin_memory=on_gpu)
    mesh = init_device_mesh(device.type, (1,))
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = job.optimizer
    adamw = {
        "lr": optimizer["lr"],
        "betas": (optimizer["beta1"], optimizer["beta2"]),
        "eps": optimizer["eps"],
        "fused": True,
    }
    groups = parameter_groups(model, decayed, optimizer["weight_decay"])
    update = torch.optim.AdamW(groups, **adamw)
    clip_norm = optimizer["clip_norm"]

    def step(batch: Batch) -> tuple[float, float | None]:
        update.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = None
        if clip_norm is not None:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            norm = total.full_tensor().item()  # type: ignore[attr-defined]
        update.step()
        return loss.item(), norm

    settings = {
        "fully_shard": {
            "units": "each layer, then the rest",
            "mp_policy": str(precision),
            "offload_policy": str(offload),
        },
        "AdamW": {**adamw, "weight_decay": optimizer["weight_decay"]},
        "clip_grad_norm": clip_norm,
    }
    return Training(step, model.config.vocab_size, settings)


if __name__ == "__main__":
    serve(build)
