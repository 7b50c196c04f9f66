"""`tierstream export RUN_OR_CHECKPOINT OUT [--dtype ...]`"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.data.config import DataConfig
from tierstream.engine.data.tokenizer import has_tokenizer
from tierstream.engine.model_config import ModelConfig
from tierstream.engine.moe_config import MoeConfig
from tierstream.io.errors import ConfigError, DataError
from tierstream.io.sizes import format_bytes
from tierstream.tiered.snapshot import Snapshot
from tierstream.tools.checkpoints import find_complete_checkpoint
from tierstream.tools.options import parse_options, take_positionals

_POSITIONALS = ["RUN_OR_CHECKPOINT", "OUT"]
_DESCRIPTION = "Write the model of a checkpoint (of a run: its newest) for `from_pretrained`."


@dataclass(kw_only=True)
class ExportOptions:
    """How a model is written."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the weights; null: as trained. What the family keeps in fp32 stays fp32."""
    max_shard: ByteSize = ByteSize(5_000_000_000)  # noqa: RUF009  (immutable)
    """Largest size of a file of weights; a larger tensor has a file of its own."""
    tokenizer: str | None = None
    """Directory of the tokenizer to copy; null: that of the run."""

    def __post_init__(self) -> None:
        if self.max_shard <= 0:
            raise ConfigError(f"max_shard is {self.max_shard}; it must be > 0 B")


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns the exit status; raises TierstreamError."""
    names, rest = take_positionals(args, _POSITIONALS, "tierstream export")
    prog = f"tierstream export {' '.join(_POSITIONALS)}"
    options = parse_options(ExportOptions, rest, prog=prog, description=_DESCRIPTION)
    export(find_complete_checkpoint(Path(names[0])), Path(names[1]), options)
    return 0


def export(checkpoint: Path, out_dir: Path, options: ExportOptions) -> None:
    """Write the model of `checkpoint`. Raises TierstreamError."""
    from tierstream.engine.data.prepare import tokenizer_directory
    from tierstream.engine.export import export_model, snapshot_reader
    from tierstream.engine.units import find_units

    snapshot = Snapshot.open(checkpoint)
    settings = snapshot.state["settings"]
    model_config = ModelConfig(**settings["model"])
    model = _build_model(model_config, settings["architecture"], snapshot.state["router_biases"])
    data_config = DataConfig(**settings["data"])
    if options.tokenizer is not None:
        data_config.tokenizer = options.tokenizer
    tokenizer_dir = tokenizer_directory(data_config, model_config, _run_of(checkpoint, settings) / "data")
    if not has_tokenizer(tokenizer_dir):
        raise DataError(f"{tokenizer_dir} holds no tokenizer; name its directory with --tokenizer")
    info = export_model(
        snapshot_reader(snapshot),
        model,
        find_units(model, experts_apart=MoeConfig(**settings["moe"]).experts_apart).in_forward_order,
        out_dir,
        dtype=options.dtype,
        tokenizer_dir=tokenizer_dir,
        source_dir=Path(model_config.path) if model_config.path is not None else None,
        max_shard_bytes=options.max_shard,
    )
    print(f"{info.path}: step {snapshot.state['step']}, {info.tensors} tensors, {format_bytes(info.nbytes)}")


def _build_model(
    config: ModelConfig, architecture: Mapping[str, Any], router_biases: Mapping[str, list[float]]
) -> Any:
    """The meta model, from the architecture stored in the checkpoint: what the run began with may be gone."""
    from tierstream.engine import source
    from tierstream.engine.meta_model import build_meta_model, materialise_buffers
    from tierstream.engine.router_bias import restore_biases
    from tierstream.engine.safetensors_dir import open_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(architecture))
        stored = ModelConfig(config=folder, dtype=config.dtype, attention=config.attention)
        model, _ = build_meta_model(stored)
    if model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        # Of the buffers that belong to the weights only these move; the others are those of the source.
        plan = source.plan_load(model, open_checkpoint(config.path)) if config.path is not None else None
        materialise_buffers(model, plan, "cpu")
        restore_biases(model, router_biases)
    return model


def _run_of(checkpoint: Path, settings: Mapping[str, Any]) -> Path:
    """The run directory around a checkpoint, wherever it was moved; else where it was written."""
    run_dir = checkpoint.absolute().parent.parent
    return run_dir if (run_dir / "config.yaml").is_file() else Path(settings["run_dir"])
