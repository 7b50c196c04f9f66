"""The models that were planned before, as units. A plan needs nothing else of a model, and to build one is to
import torch, its compiler and transformers: seconds, however small the model.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from tierstream.engine import user_cache
from tierstream.engine.config import RunConfig
from tierstream.engine.model.units import Anatomy, ModelUnits, numbered
from tierstream.engine.update.groups import Groups
from tierstream.engine.update.optimizer import Group
from tierstream.tiered.layout import TensorSpec, Unit

#: Units of a model, and rows of its output matrix.
Model: TypeAlias = tuple[ModelUnits, int]

_KIND = "units"
_UNITS = ("tables", "around", "layers", "beside_head")


def name_of(config: RunConfig) -> str | None:
    """A name for all that units depend on: the run's settings for them, the config.json, the code of the
    family and ours, versions. None: it has none, for the model brings its own code, or transformers has no
    such family.
    """
    model = config.model
    file = Path(model.path or model.config or "")
    with suppress(OSError, ValueError, LookupError, TypeError):
        text = (file / "config.json" if file.is_dir() else file).read_text(encoding="utf-8")
        transformers, torch = _directory("transformers"), _directory("torch")
        family = _family(transformers / "models", json.loads(text)["model_type"])
        if model.trust_remote_code:
            return None
        settings = asdict(model) | {"path": None, "config": text}
        return user_cache.digest_of({
            "settings": [settings, asdict(config.moe), asdict(config.optimizer), config.train.chunks_rows],
            "family": user_cache.digest_of_files(family.glob("*.py")),
            "versions": user_cache.digest_of_files([transformers / "__init__.py", torch / "version.py"]),
            "engine": user_cache.digest_of_engine(),
        })  # fmt: skip
    return None


def find(name: str) -> Model | None:
    """None: not known yet, or not readable. A class that only a model itself needs is `object` in them."""
    with suppress(LookupError, TypeError):
        plain = user_cache.find(_KIND, name)
        return _units(plain["units"]), plain["vocabulary"]
    return None


def keep(name: str, model: Model) -> None:
    """Where that cannot be written, the next plan builds the model again."""
    units, vocabulary = model
    user_cache.keep(_KIND, name, {"units": _plain(units), "vocabulary": vocabulary})


def _family(models: Path, kind: str) -> Path:
    """The folder of a type of models; gemma3n has that of gemma3n_text. Raises LookupError: there is none."""
    while not (models / kind / "__init__.py").is_file():
        if "_" not in kind:
            raise LookupError(kind)
        kind = kind.rpartition("_")[0]
    return models / kind


def _directory(package: str) -> Path:
    """Without importing it. Raises LookupError: it is not there."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(package)
    return Path(spec.origin).parent


def _plain(units: ModelUnits) -> dict[str, Any]:
    """As JSON values. Experts of a layer are like its first but for their numbers."""
    anatomy = {f.name: getattr(units.anatomy, f.name) for f in fields(Anatomy) if f.name != "decoder_output"}
    return {
        "embed": asdict(units.embed),
        **{key: [asdict(unit) for unit in getattr(units, key)] for key in _UNITS},
        "head": asdict(units.head),
        "beside": [[asdict(unit) for unit in own] for own in units.beside],
        "experts": [(len(own), asdict(own[0]) if own else None) for own in units.experts],
        "passed_by": units.passed_by,
        "tied": units.tied,
        "table": [asdict(group) for group in units.groups.table],
        "group_of": units.groups.of,
        "anatomy": anatomy,
    }


def _units(plain: dict[str, Any]) -> ModelUnits:
    """Raises LookupError, TypeError: these are not the values of any."""
    embed = _unit(plain["embed"])
    parts = {key: tuple(map(_unit, plain[key])) for key in _UNITS}
    anatomy = plain["anatomy"] | {"tables": tuple(plain["anatomy"]["tables"])}
    return ModelUnits(
        embed=embed,
        **parts,
        beside=tuple(tuple(map(_unit, own)) for own in plain["beside"]),
        experts=tuple(_experts(*own) for own in plain["experts"]),
        passed_by=tuple(plain["passed_by"]),
        head=embed if plain["tied"] else _unit(plain["head"]),
        tied=plain["tied"],
        groups=Groups(tuple(Group(**group) for group in plain["table"]), plain["group_of"]),
        anatomy=Anatomy(**anatomy, decoder_output=object),
    )


def _unit(plain: dict[str, Any]) -> Unit:
    tensors = (TensorSpec(**tensor | {"shape": tuple(tensor["shape"])}) for tensor in plain["tensors"])
    return Unit(plain["name"], plain["dtype"], tuple(tensors), plain["numel"])


def _experts(count: int, first: dict[str, Any] | None) -> tuple[Unit, ...]:
    if first is None:
        return ()
    return numbered(_unit(first), count)
