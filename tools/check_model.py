"""`tierstream check-model MODEL`"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from tierstream.engine.config import RunConfig, TrainConfig
from tierstream.engine.config_file import load
from tierstream.engine.model.config import ModelConfig
from tierstream.tools.options import parse_options, take_positionals
from tierstream.tools.quiet import without_warnings
from tierstream.tools.tables import count, open_console, table

#: Files of weights, and of what lists them.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_DESCRIPTION = """\
Say whether a model can be trained as transformers would train it: a tiny twin of
its architecture, with random weights, is compared in all that a run relies on.
- MODEL is a model directory, with or without weights, a config.json, or a run file.
- Exit status 0: it trains. 2: it does not, and the table says why.
"""


@dataclass(kw_only=True)
class CheckOptions:
    """How a model is compared."""

    trust_remote_code: bool = False
    """Run the Python code that the model directory brings along."""
    attention: Literal["auto", "sdpa", "eager", "sinks"] = "auto"
    """See model.attention."""
    device: str = "cpu"
    """Where both compute: cpu, to the bit, or cuda, to rounding."""
    json: bool = False
    """One JSON object in place of the table."""

    def __post_init__(self) -> None:
        TrainConfig(device=self.device)


def main(args: Sequence[str]) -> int:
    """The command with its arguments. Returns 0 or, where the model cannot be trained, 2; raises
    TierstreamError.
    """
    names, rest = take_positionals(args, ["MODEL"], "tierstream check-model")
    options = parse_options(CheckOptions, rest, prog="tierstream check-model MODEL", description=_DESCRIPTION)
    with without_warnings():
        path = Path(names[0])
        return _check(_model_config(path, options), options, None if _is_run(path) else "MODEL")


def _model_config(path: Path, options: CheckOptions) -> ModelConfig:
    if _is_run(path):
        model = load(RunConfig, path).model
        if options.attention != "auto":
            model.attention = options.attention
        model.trust_remote_code |= options.trust_remote_code
        return model
    has_weights = path.is_dir() and any(chain.from_iterable(map(path.glob, _WEIGHTS)))
    return ModelConfig(
        path=str(path) if has_weights else None,
        config=None if has_weights else str(path),
        attention=options.attention,
        trust_remote_code=options.trust_remote_code,
    )


def _is_run(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _check(config: ModelConfig, options: CheckOptions, named: str | None) -> int:
    from tierstream.engine.device.device import Device
    from tierstream.engine.model.carve import find_units
    from tierstream.engine.model.meta_model import build_meta_model, read_hf_config
    from tierstream.engine.parity.gate import compare_twin
    from tierstream.engine.weights.source import plan_source

    Device(options.device)  # refuses one that is not there
    verdict = compare_twin(read_hf_config(config, named=named), config, options.device)
    about = f"{verdict.model}, compared by a tiny twin of it"
    if verdict.why_not is None:  # then the model itself: no weight is read
        model, _ = build_meta_model(config)
        about = f"{verdict.model}, {count(find_units(model).numel)} parameters; compared by a tiny twin of it"
        if config.path is not None:
            plan_source(model, config)
            about += f"; the weights in {config.path} have their place"
    if options.json:
        print(json.dumps({"trains": verdict.why_not is None, "packs": verdict.packs, **verdict.to_plain()}))
    else:
        _print(verdict, about)
    return 0 if verdict.why_not is None else 2


def _print(verdict: Any, about: str) -> None:
    console = open_console(sys.stdout, 120)
    console.print(about, soft_wrap=True)
    rows = [("yes" if check.holds else "no", check.name, check.found) for check in verdict.checks]
    console.print(table("As in transformers", ("", "what", "found"), rows, text_columns=3))
    if verdict.why_not is not None:
        console.print(f"cannot be trained: {verdict.why_not}", soft_wrap=True)
    elif verdict.packs:
        console.print("trains")
    else:
        console.print("trains with one document a row (data.packing: none)")
