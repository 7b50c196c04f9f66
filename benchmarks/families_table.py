"""Every decoder of the installed transformers through the gate: `python benchmarks/families_table.py`.

Writes docs/families.md. Each family is compared in a process of its own, for at most 200 seconds; its
configuration is the default of its class, but for what that leaves out.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.meta_model import check_decoder
from tierstream.engine.parity.gate import compare_twin
from tierstream.engine.parity.verdict import NAMES, Check, Verdict
from tierstream.io.errors import ModelSourceError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
_SECONDS = 200
#: What default configurations leave out, or leave off.
_LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "doge": {"is_moe": False},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 16},
}
#: Kinds of a family that its default is not: row -> (family, settings).
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
}
_COLUMNS = {
    "binds": "binds", "loss": "loss equal", "gradients": "gradients bit-equal", "packing": "packing safe",
    "load": "load", "export": "export",
}  # fmt: skip


def configurations() -> dict[str, Any]:
    """Name of a row -> the configuration, or why there is none."""
    kinds = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    wanted = {name: (name, _LACKING.get(name, {})) for name in kinds} | _VARIANTS
    return {row: _made(kinds[name], settings) for row, (name, settings) in sorted(wanted.items())}


def _made(kind: type, settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except Exception as error:
        return f"its default configuration cannot be made: {' '.join(str(error).split())}"


def verdict_of(name: str, config: Any) -> Verdict:
    """Of one row."""
    if isinstance(config, str):
        return _refused(name, config)
    try:
        check_decoder(config, False, name)
    except ModelSourceError as error:
        return _refused(name, str(error).removeprefix(f"{name}: "))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(name, config, theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(_SECONDS):
            return _refused(name, f"no verdict after {_SECONDS} s")
        return Verdict.from_plain(ours.recv())
    except EOFError:
        return _refused(name, "the process died")
    finally:
        child.kill()
        child.join()


def _child(name: str, config: Any, answer: Connection) -> None:
    torch.set_num_threads(1)
    answer.send(compare_twin(config, ModelConfig(config=name)).to_plain())


def _refused(name: str, why: str) -> Verdict:
    return Verdict(name, (Check("binds", False, why),))


def table_row(name: str, verdict: Verdict) -> str:
    """One line of the table."""
    checks = {check.name: check for check in verdict.checks}
    cells = ["-" if key not in checks else "yes" if checks[key].holds else "no" for key in NAMES]
    if "experts one by one" in verdict.found("gradients"):
        cells[NAMES.index("gradients")] = "yes; experts one by one: rounding"
    wrong = [
        f"{check.name}: {check.found.removeprefix(f'{name}: ')}"
        for check in verdict.checks
        if not check.holds
    ]
    why = "; ".join(wrong).replace("|", "/").replace("`", "'")
    return f"| {name} | {' | '.join(cells)} | {why[:240]} |"


def page(verdicts: dict[str, Verdict]) -> Iterator[str]:
    """docs/families.md, line by line."""
    bind = sum(verdict.checks[0].holds for verdict in verdicts.values())
    train = sum(verdict.why_not is None for verdict in verdicts.values())
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    yield f"""\
# Families

Every causal language model of {versions}, and what `tierstream check-model`
says of its default configuration on a CPU, in fp32 and in bf16: of {len(verdicts)} rows {bind} bind,
{train} train. [Your own model](how-to/own-model.md) says what the columns mean. A family that is not
packing safe trains with one document a row.

Made by `python benchmarks/families_table.py`.

| family | {" | ".join(_COLUMNS[name] for name in NAMES)} | why not |
|{" --- |" * (len(NAMES) + 2)}"""
    yield from (table_row(name, verdict) for name, verdict in verdicts.items())


def main() -> None:
    verdicts = {}
    for name, config in configurations().items():
        verdicts[name] = verdict_of(name, config)
        print(table_row(name, verdicts[name]), flush=True)
    PAGE.write_text("\n".join(page(verdicts)) + "\n")


if __name__ == "__main__":
    main()
