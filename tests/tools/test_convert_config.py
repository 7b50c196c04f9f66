"""Run files from DeepSpeed configurations and arguments of transformers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.command import Command

from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import parse
from tierstream.engine.config_tree import build
from tierstream.tools.convert_config import convert
from tierstream.tools.convert_config.source import Source

OFFLOADED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.02},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": 2e-5,
            "warmup_num_steps": 1e2,
            "total_num_steps": 3000,
            "warmup_type": "linear",
        },
    },
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/a", "pin_memory": True, "buffer_size": 1e8},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "pipeline_read": False},
        "stage3_prefetch_bucket_size": "auto",
    },
    "aio": {"thread_count": 3, "block_size": 1048576},
    "steps_per_print": 100,
}


def written(config: dict[str, Any], arguments: dict[str, Any] | None = None, gpus: int = 1) -> str:
    args = None if arguments is None else Source(arguments, "args.json")
    return convert(Source(config, "ds.json"), args, gpus)


def loaded(text: str) -> RunConfig:
    """With the keys that are to be filled in filled in."""
    text = text.replace("# run_dir: (to fill in)", "run_dir: r #")
    text = text.replace("  # path: (to fill in)", "  path: m #").replace(
        "  # files: (to fill in)", "  files: [f] #", 1
    )
    return build(RunConfig, parse(RunConfig, text, "run.yaml"), "run.yaml")


def comments(text: str) -> str:
    """In one line."""
    return " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines() if "#" in line)


def test_all_that_has_a_counterpart_is_taken_over() -> None:
    config = loaded(written(OFFLOADED))
    optimizer, train = config.optimizer, config.train
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (2e-5, 0.8, 0.99, 1e-7)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.schedule) == (0.02, 0.5, "linear")
    assert (optimizer.warmup_steps, optimizer.min_lr_ratio) == (100, 0.0)
    assert (train.steps, train.rows_per_step, train.rows_per_chunk, train.device) == (3000, 64, 4, "cuda")
    assert (config.tiers.nvme_dirs, config.tiers.io_threads) == (["/a", "/b"], 3)
    assert config.model.dtype == "bfloat16"


def test_what_is_left_out_is_told_with_its_reason() -> None:
    text = written(OFFLOADED | {"zero_optimisation": {"stage": 2}})
    assert all(len(line) <= 80 for line in text.splitlines())
    said = comments(text)
    assert (
        "optimizer.lr: optimizer.params.lr says 0.0003, scheduler.params.warmup_max_lr says 2.0e-05" in said
    )
    assert re.search(r"zero_optimization.offload_param.pin_memory: with a GPU the DRAM tier is pinned", said)
    assert "Not known to the converter, and left out: zero_optimisation.stage." in said
    assert "To fill in: run_dir, model.path, data.files, tiers.dram, data.seq_len." in said
    assert "loss_scale" not in said  # of a section that is not enabled


def test_an_unknown_key_is_no_known_section() -> None:
    """A section is not taken for known because some of its keys are."""
    text = comments(written({"zero_optimization": {"stagee": 3}, "fp16": {"enabled": True, "scale": 1}}))
    assert "left out: zero_optimization.stagee, fp16.scale." in text


def test_what_deepspeed_would_have_done_unasked() -> None:
    """Its defaults are not ours."""
    config = loaded(written({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}, gpus=4))
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (
        1e-3,
        0.999,
        0.0,
        None,
    )
    assert (optimizer.schedule, config.model.dtype) == ("constant", "float32")
    assert (config.train.rows_per_step, config.train.rows_per_chunk) == (8, 2)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"type": "WarmupLR"}, ("constant", 1000, 1e-3, 0.1)),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 0}},
            ("constant", 0, 0.5, 0.1),
        ),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 7}}, ("linear", 1000, 1e-3, 0.0)),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 7}}, ("cosine", 1000, 1e-4, 1e-4)),
        ({"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.3}}, ("cosine", 1000, 1e-4, 0.3)),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0.3}}, ("cosine", 0, 1e-4, 0.1)),
    ],
)
def test_schedulers(scheduler: dict[str, Any], expected: tuple[str, int, float, float]) -> None:
    text = written({"scheduler": scheduler})
    optimizer = loaded(text).optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.lr, optimizer.min_lr_ratio) == expected
    assert ("(to fill in) scheduler.type is OneCycle" in text) == (scheduler["type"] == "OneCycle")


@pytest.mark.parametrize("optimizer", [{"type": "Lamb"}, {"type": "Adam", "params": {"adam_w_mode": False}}])
def test_parameters_of_another_optimizer_are_not_taken(optimizer: dict[str, Any]) -> None:
    optimizer = {
        "type": optimizer["type"],
        "params": {"lr": 0.5, "max_coeff": 1, **optimizer.get("params", {})},
    }
    text = written({"optimizer": optimizer})
    assert loaded(text).optimizer.lr == 1e-4
    assert "choose its learning rate and decay anew" in comments(text)
    assert "optimizer.params.max_coeff: AdamW is the only optimizer" in comments(text)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def test_auto_is_to_be_filled_in() -> None:
    text = written(AUTO)
    assert loaded(text).train.rows_per_step == 8
    for key in ("lr", "eps", "weight_decay", "clip_norm", "rows_per_step", "rows_per_chunk", "dtype"):
        assert re.search(rf'  # {key}: \(to fill in\) [\w.]+ is "auto"', text), key


def test_arguments_fill_in_what_is_auto() -> None:
    arguments = {
        "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "bf16": True,
        "learning_rate": 2e-5, "max_grad_norm": 0.7, "num_train_epochs": 2, "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03, "packing": True, "max_length": 2048, "assistant_only_loss": True, "seed": 3,
        "save_strategy": "steps", "save_steps": 50, "save_total_limit": 4, "optim": "adamw_torch_fused",
        "dataset_text_field": "body", "dataset_num_proc": 3, "gradient_checkpointing": True, "odd": 1,
    }  # fmt: skip
    text = written(AUTO, arguments, gpus=2)
    config = loaded(text)
    assert (config.run_dir, config.train.epochs, config.train.steps, config.train.seed) == (
        "out",
        2.0,
        None,
        3,
    )
    assert (config.train.rows_per_step, config.train.rows_per_chunk) == (12, 2)
    assert (config.optimizer.lr, config.optimizer.clip_norm, config.optimizer.min_lr_ratio) == (
        2e-5,
        0.7,
        0.0,
    )
    assert (config.data.seq_len, config.data.packing, config.data.text_field) == (2048, "whole", "body")
    assert (config.data.train_on, config.data.workers, config.model.dtype) == ("answers", 3, "bfloat16")
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (50, 4)
    assert "# warmup_steps: (to fill in) 0.03 of all steps" in text
    assert "left out: odd." in text


def test_a_chunk_is_no_larger_than_its_step() -> None:
    text = written({"train_batch_size": 4}, {"per_device_train_batch_size": 8})
    train = loaded(text).train
    assert (train.rows_per_step, train.rows_per_chunk) == (4, None)
    assert "8 rows are more than a step of 4 has" in text
    text = written({"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": "auto"})
    assert loaded(text).train.rows_per_chunk is None


def test_loggers() -> None:
    config = loaded(
        written({"wandb": {"enabled": True, "project": "p"}}, {"report_to": "tensorboard", "run_name": "n"})
    )
    assert (config.log.wandb, config.log.tensorboard, config.log.name) == ("p", True, "n")
    text = written({}, {"report_to": ["wandb", "mlflow", "trackio"], "project": "q"})
    assert loaded(text).log.trackio == "q"
    assert "# wandb: (to fill in)" in text
    assert "report_to: there is no logger mlflow" in comments(text)


def test_evaluation_waits_for_its_files() -> None:
    text = written({}, {"eval_strategy": "steps", "eval_steps": 50, "load_best_model_at_end": True})
    assert loaded(text).eval.files is None
    assert "# every_steps: (to fill in) eval_steps is 50" in text
    assert "# keep_best: (to fill in) load_best_model_at_end" in text


def test_warm_up_stable_decay() -> None:
    arguments = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 30}}
    optimizer = loaded(written({}, arguments)).optimizer
    assert (optimizer.schedule, optimizer.decay_steps, optimizer.min_lr_ratio) == ("wsd", 30, 0.0)


def test_a_share_of_known_steps_is_a_number() -> None:
    config = loaded(written({}, {"max_steps": 150, "warmup_steps": 0.05, "num_train_epochs": 3.0}))
    assert (config.train.steps, config.train.epochs, config.optimizer.warmup_steps) == (150, None, 8)


def test_every_argument_of_transformers_is_known() -> None:
    fields = [spec.name for spec in dataclasses.fields(transformers.TrainingArguments)]
    taken = _taken_over()
    text = written({}, {name: 1 for name in fields if name not in taken})
    assert "Not known" not in text
    assert "learning_rate" in taken & set(fields)


def test_every_argument_of_trl_is_known() -> None:
    fields = (
        "activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_kwargs "
        "dataset_num_proc dataset_text_field eos_token eval_packing loss_type max_length model_init_kwargs "
        "packing packing_strategy pad_to_multiple_of pad_token padding_free shuffle_dataset truncation_mode"
    )
    taken = _taken_over()
    assert "Not known" not in written({}, {name: 1 for name in fields.split() if name not in taken})


def _taken_over() -> set[str]:
    asked = Source({}, "args.json")
    taken: set[str] = set()
    asked.take = lambda key, hint: taken.add(key.partition(".")[0])  # type: ignore[method-assign]
    convert(Source({}, "ds.json"), asked)
    return taken


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"gradient_clipping": "1.0"}', 'gradient_clipping is "1.0"; it must be a finite number'),
        ('{"bf16": {"enabled": 1}}', "bf16.enabled is 1; it must be true or false"),
        ('{"bf16": true}', "bf16 is true; it must be a section"),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4; it must be one of 0, 1, 2, 3"),
        (
            '{"zero_optimization": {"offload_param": {"device": "nvme"}}}',
            "zero_optimization.offload_param.nvme_path must name a directory",
        ),
        (
            '{"optimizer": {"type": "Adam", "params": {"betas": [1]}}}',
            "betas is [1.0]; it must be two numbers",
        ),
        (
            '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}',
            "train_batch_size is 10, which is no multiple",
        ),
        ('{"train_batch_size": 0}', "train_batch_size is 0; it must be >= 1"),
        ('{"a": 1, "a": 2}', "a is given twice"),
        ("{\n1}", "ds.json:2: is not valid JSON"),
        ("[]", "must hold one JSON object"),
    ],
)
def test_wrong_values_are_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str, said: str
) -> None:
    (tmp_path / "ds.json").write_text(config)
    Command(capsys, tmp_path).refused("convert-config", str(tmp_path / "ds.json"), said=["ds.json", said])


def test_the_command_writes_a_file_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(OFFLOADED))
    Path("args.json").write_text('{"max_length": 512}')
    command = Command(capsys, tmp_path)
    args = ("convert-config", "ds.json", "--training-args", "args.json", "--out", "run.yaml")
    assert command.run(*args)[0] == 0
    assert "# Converted from ds.json and args.json." in Path("run.yaml").read_text()
    assert loaded(Path("run.yaml").read_text()).data.seq_len == 512
    command.refused(*args, said=["run.yaml is there already"])
    command.refused("convert-config", "none.json", said=["none.json: cannot be read"])
    status, out, _ = command.run("convert-config", "ds.json")
    assert (status, out.splitlines()[0]) == (0, "# Converted from ds.json.")
