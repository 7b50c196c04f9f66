"""The model card of an export (README.md): where the model comes from and how it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from tierstream import __version__

#: What a card takes over from that of the base model, under whose terms it stands.
_INHERITED = ("license", "license_name", "license_link", "language")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run; None: not known.

    Attributes:
        base_model: directory that the weights come from; None: from random ones.
        steps, updates: done, and of them those that changed the weights.
        tokens: positions seen, padding included.
        loss: of the last step, in nats per token.
        data_fingerprint: of the token stream.
        frozen_parameters: that were not trained.
    """

    base_model: str | None
    steps: int
    updates: int
    tokens: int | None
    loss: float | None
    data_fingerprint: str | None
    frozen_parameters: int = 0


def write_card(directory: Path, name: str, facts: RunFacts, source_dir: Path | None) -> None:
    """`README.md` in `directory` for a model called `name`.

    Licence and languages are those that the card in `source_dir` names.
    """
    data = ModelCardData(
        base_model=_hub_name(facts.base_model),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tierstream"],
        **_inherited(source_dir),
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_text(name, facts)}").save(directory / "README.md")


def _text(name: str, facts: RunFacts) -> str:
    base = facts.base_model and (_hub_name(facts.base_model) or Path(facts.base_model).name)
    begin = f"from the weights of `{base}`" if base else "from random weights"
    rows = [("steps", f"{facts.steps:,}"), ("updates of the weights", f"{facts.updates:,}")]
    if facts.tokens is not None:
        rows.append(("tokens, padding included", f"{facts.tokens:,}"))
    if facts.loss is not None:
        rows.append(("loss of the last step", f"{facts.loss:.4f}"))
    if facts.data_fingerprint is not None:
        rows.append(("fingerprint of the data", f"`{facts.data_fingerprint}`"))
    if facts.frozen_parameters:
        rows.append(("parameters that were not trained", f"{facts.frozen_parameters:,}"))
    rows.append(("trained with", f"tierstream {__version__}"))
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    what = "some parameters" if facts.frozen_parameters else "all parameters"
    return f"# {name}\n\nTrained {begin}, {what}, at full precision.\n\n| | |\n| --- | --- |\n{table}\n"


def _hub_name(base_model: str | None) -> str | None:
    """`owner/name` of a directory in the hub's cache, `models--owner--name/snapshots/revision`."""
    for part in reversed(Path(base_model or "").parts):
        words = part.split("--")
        if words[0] == "models" and len(words) > 1:
            return "/".join(words[1:])
    return None


def _inherited(source_dir: Path | None) -> dict[str, Any]:
    card = source_dir / "README.md" if source_dir is not None else None
    if card is None or not card.is_file():
        return {}
    try:
        data = ModelCard(card.read_text(errors="replace"), ignore_metadata_errors=True).data.to_dict()
    except (ValueError, YAMLError):
        return {}
    return {key: data[key] for key in _INHERITED if data.get(key)}
