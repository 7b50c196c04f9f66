"""`tierstream export RUN_OR_CHECKPOINT OUT [--master ...]`"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.progress import OnProgress, Progress, not_told
from tierstream.engine.data.tokenizer import has_tokenizer, load_tokenizer
from tierstream.engine.metrics import read_metrics
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.moe.config import MoeConfig
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.io.errors import ConfigError, DataError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.snapshot import Snapshot
from tierstream.tools.checkpoints import find_complete_checkpoint
from tierstream.tools.live import ConsoleCallback
from tierstream.tools.options import parse_options, take_positionals

if TYPE_CHECKING:
    from tierstream.engine.export.model_card import RunFacts
    from tierstream.engine.weights.source import LoadPlan

_POSITIONALS = ["RUN_OR_CHECKPOINT", "OUT"]
_DESCRIPTION = "Write the model of a checkpoint (of a run: its newest) for `from_pretrained`."


@dataclass(kw_only=True)
class ExportOptions:
    """How a model is written."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the weights; null: as trained. What the family keeps in fp32 stays fp32."""
    master: bool = False
    """Write the optimizer's fp32 masters: all bits of what was trained, to go on from elsewhere."""
    max_shard: ByteSize | None = None
    """Largest size of a file of weights; a larger tensor has a file of its own. null: the files of the model
    that the run began with, if their tensors are as large, else 5 GB."""
    tokenizer: str | None = None
    """Directory of the tokenizer to copy; null: that of the run."""
    source: str | None = None
    """Where the model directory that the run began with lies now; null: where it was."""

    def __post_init__(self) -> None:
        if self.max_shard is not None and self.max_shard <= 0:
            raise ConfigError(f"max_shard is {self.max_shard}; it must be > 0 B")
        if self.master and self.dtype == "bfloat16":
            raise ConfigError("master is true and dtype is bfloat16; masters are in float32")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    names, rest = take_positionals(args, _POSITIONALS, "tierstream export")
    prog = f"tierstream export {' '.join(_POSITIONALS)}"
    options = parse_options(ExportOptions, rest, prog=prog, description=_DESCRIPTION)
    with ConsoleCallback() as screen:
        told = export(
            find_complete_checkpoint(Path(names[0])), Path(names[1]), options, on_progress=screen.on_progress
        )
    print(told)
    return 0


def export(
    checkpoint: Path, out_dir: Path, options: ExportOptions, *, on_progress: OnProgress = not_told
) -> str:
    """Write the model of `checkpoint`; what was written, in a line. Raises TierstreamError."""
    from tierstream.engine.data.prepare import tokenizer_directory
    from tierstream.engine.export.export import export_model, snapshot_reader
    from tierstream.engine.model.carve import units_of_run

    snapshot = Snapshot.open(checkpoint)
    settings = snapshot.state["settings"]
    model_config = ModelConfig(**settings["model"])
    if options.source is not None and model_config.path is None:
        raise ConfigError(f"the run of {checkpoint} began with random weights; leave out --source")
    if options.source is not None:
        model_config.path = options.source
    model = _build_model(model_config, settings["architecture"])
    source = _source(model, model_config, must_be_there=options.source is not None)
    _fill_buffers(model, source, model_config, snapshot.state["router_biases"])
    run_dir = _run_of(checkpoint, settings)
    data_config = DataConfig(**settings["data"])
    if options.tokenizer is not None:
        data_config.tokenizer = options.tokenizer
    tokenizer_dir = tokenizer_directory(data_config, model_config, run_dir / "data")
    if not has_tokenizer(tokenizer_dir):
        raise DataError(f"{tokenizer_dir} holds no tokenizer; name its directory with --tokenizer")
    if options.tokenizer is not None:
        _compare_tokenizer(tokenizer_dir, model.config.get_text_config(decoder=True).vocab_size)
    moe, optimizer = MoeConfig(**settings["moe"]), OptimizerConfig(**settings["optimizer"])
    units = units_of_run(model, moe, optimizer)
    info = export_model(
        snapshot_reader(snapshot),
        model,
        units.in_forward_order,
        out_dir,
        dtype="float32" if options.master else options.dtype,
        tokenizer_dir=tokenizer_dir,
        chat_template=snapshot.state.get("chat_template"),
        source=source,
        code_dir=model_config.code_dir,
        new_ids=model_config.path is None,
        max_shard_bytes=options.max_shard,
        facts=_facts(snapshot.state, settings["model"]["path"], run_dir, units.frozen),
        progress=lambda done, total: on_progress(Progress(f"writing {out_dir}", done, total)),
    )
    carried = f", {info.carried} of them as they were" if info.carried else ""
    size = format_bytes(info.nbytes)
    return f"{info.path}: step {snapshot.state['step']}, {info.tensors} tensors{carried}, {size}"


def _compare_tokenizer(directory: Path, rows: int) -> None:
    """Tells of tokens that the model has no rows for: some families have such, for pictures."""
    if (tokens := len(load_tokenizer(directory))) > rows:
        print(
            f"warning: the tokenizer in {directory} has {tokens} tokens and the model {rows} rows: it fails "
            f"on texts with tokens from {rows} on"
        )


def _build_model(config: ModelConfig, architecture: Mapping[str, Any]) -> Any:
    """The meta model, from the architecture stored in the checkpoint: what the run began with may be gone,
    but for code of its own.
    """
    from tierstream.engine.model.meta_model import build_meta_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(architecture))
        for file in config.code_dir.glob("*.py") if config.code_dir else ():
            shutil.copy(file, folder)
        model, _ = build_meta_model(replace(config, path=None, config=folder, vocab_size=None))
    return model


def _source(model: Any, config: ModelConfig, *, must_be_there: bool) -> LoadPlan | None:
    """What the run began with, if it had weights and they are still there."""
    from tierstream.engine.weights.source import plan_source

    if config.path is None:
        return None
    if not must_be_there and not Path(config.path).exists():
        print(
            f"{config.path}, which the run began with, is gone: its files, its generation_config.json and "
            "what else it held are not taken over; name its place with --source"
        )
        return None
    return plan_source(model, config)


def _fill_buffers(
    model: Any, source: LoadPlan | None, config: ModelConfig, router_biases: Mapping[str, list[float]]
) -> None:
    """Buffers that belong to the weights: some moved in training, the others are those of the source."""
    from tierstream.engine.model.meta_model import materialise_buffers
    from tierstream.engine.moe.router_bias import biases_of, restore_biases
    from tierstream.engine.weights.safetensors_dir import some

    stored = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    if not stored:
        return
    if config.path is not None and source is None and (lost := sorted(stored - biases_of(model).keys())):
        raise ConfigError(
            f"{some(lost)} are buffers that only the model directory of the run holds; name its place with "
            "--source"
        )
    materialise_buffers(model, source, "cpu")
    restore_biases(model, router_biases)


def _facts(state: Mapping[str, Any], base_model: str | None, run_dir: Path, frozen: int) -> RunFacts:
    """For the model card; what the records of the run say, as far as they are there."""
    from tierstream.engine.export.model_card import RunFacts

    file = run_dir / "metrics.jsonl"
    records = (
        [record for record in read_metrics(file) if record.step <= state["step"]] if file.exists() else []
    )
    return RunFacts(
        base_model=base_model,
        steps=state["step"],
        updates=state["applied_updates"],
        tokens=sum(record.tokens for record in records) if records else None,
        loss=records[-1].loss if records else None,
        data_fingerprint=state.get("data_fingerprint"),
        frozen_parameters=frozen,
    )


def _run_of(checkpoint: Path, settings: Mapping[str, Any]) -> Path:
    """The run directory around a checkpoint, wherever it was moved; else where it was written."""
    run_dir = checkpoint.absolute().parent.parent
    return run_dir if (run_dir / "config.yaml").is_file() else Path(settings["run_dir"])
