"""What an export holds beside its weights: configuration, tokenizer, code, licence, model card."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from tierstream.engine.data.codec import default_template, end_of_answer_id
from tierstream.engine.data.tokenizer import load_tokenizer
from tierstream.engine.export.model_card import RunFacts, write_card
from tierstream.engine.export.plan import ExportDtype
from tierstream.io import durable
from tierstream.io.errors import storage_errors

#: What a tokenizer is made of, chat templates included.
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
#: Under which terms the source's weights may be used.
_LICENCE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_TEMPLATE_FILE = "chat_template.jinja"
_GENERATION_FILE = "generation_config.json"


def write_descriptions(
    model: Any,
    dtype: ExportDtype | None,
    directory: Path,
    *,
    name: str,
    tokenizer_dir: Path | None,
    chat_template: str | None,
    source_dir: Path | None,
    code_dir: Path | None,
    new_ids: bool,
    facts: RunFacts | None,
) -> None:
    """All files but the weights, for a model called `name`; for the rest see `export_model`."""
    config = copy.deepcopy(model.config)
    own = getattr(model, "generation_config", None)  # some with code of their own do not generate
    generation = GenerationConfig.from_model_config(config) if own is None else copy.deepcopy(own)
    config.dtype = getattr(torch, dtype) if dtype is not None else model.dtype
    config.architectures = [type(model).__name__]
    if source_dir is not None:
        _copy(source_dir, directory, _LICENCE_FILES)
    if hasattr(config, "auto_map"):  # code for software that does not know the family
        if code_dir is not None and _has_code(code_dir, config.auto_map):
            _copy(code_dir, directory, ("*.py",))
        else:
            del config.auto_map
    answer_end: int | None = None
    if tokenizer_dir is not None:
        _copy(tokenizer_dir, directory, _TOKENIZER_FILES)
        if chat_template is not None:  # transformers prefers this file to what tokenizer_config.json says
            durable.write_file(directory / _TEMPLATE_FILE, chat_template.encode())
        tokenizer = load_tokenizer(directory)
        answer_end = end_of_answer_id(tokenizer, default_template(tokenizer))
        if new_ids:
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                token_id = getattr(tokenizer, key)
                if token_id is None or token_id < config.vocab_size:
                    setattr(config, key, token_id)
                    setattr(generation, key, token_id)
    with storage_errors("writing", directory):
        config.save_pretrained(directory)
        if source_dir is not None and (source_dir / _GENERATION_FILE).is_file():
            shutil.copyfile(source_dir / _GENERATION_FILE, directory / _GENERATION_FILE)
        else:
            generation.save_pretrained(directory)
        if answer_end is not None:
            _stop_at(answer_end, directory / _GENERATION_FILE)
        if facts is not None:
            write_card(directory, name, facts, source_dir)


def _stop_at(token_id: int, file: Path) -> None:
    """Have `generate` end a text at this token too: base models end texts only, and answers end otherwise."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token_id not in ends:
        settings["eos_token_id"] = [*ends, token_id]
        file.write_text(json.dumps(settings, indent=2) + "\n")


def _has_code(source_dir: Path, auto_map: Any) -> bool:
    """Whether the modules that `auto_map` names (`module.Class`, or `repository--module.Class` for those that
    lie elsewhere) are there."""
    classes = [name for value in auto_map.values() for name in ([value] if isinstance(value, str) else value)]
    modules = {name.split(".")[0] for name in classes if name is not None and "--" not in name}
    return all((source_dir / f"{module}.py").is_file() for module in modules)


def _copy(source: Path, directory: Path, patterns: Iterable[str]) -> None:
    files = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        target = directory / file.relative_to(source)
        with storage_errors("copying", file, detail=f"to {target}"):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
