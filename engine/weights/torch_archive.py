"""Weights in files of `torch.save` (`pytorch_model.bin`), as tensors that lie somewhere in a file.

Such a file is a zip archive of uncompressed storages and a pickle that says which tensor is which part of
them. The pickle is only ever read by torch's restricted unpickler, which builds tensors and plain containers
and runs nothing else, and onto `meta`: it takes no memory, and says where each storage begins.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tierstream.engine.weights.tensor_entry import STORED_NAMES, TensorEntry
from tierstream.io.errors import ModelSourceError


def read_archive(file: Path) -> list[TensorEntry]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        ModelSourceError: the file is no such archive, is damaged, or holds anything but whole tensors.
    """
    remedy = "convert it to safetensors with the software that wrote it"
    try:
        content: Any = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:  # the unpickler and the archive reader raise what they like
        called = re.search(r"GLOBAL ([\w.]+)", str(error))  # amid advice to run whatever it is
        first = (str(error).strip() or repr(error)).splitlines()[0]
        reason = f"its pickle calls {called[1]}" if called else first
        raise ModelSourceError(
            f"{file} is no file of tensors that torch.load(weights_only=True, mmap=True) reads: {reason}; "
            f"download it again, or {remedy}"
        ) from error
    if not isinstance(content, dict):
        raise ModelSourceError(f"{file} holds a {type(content).__name__}, not tensors by name; {remedy}")
    entries = [_entry(file, str(name), value, remedy) for name, value in content.items()]
    return sorted(entries, key=lambda entry: (entry.offset, entry.nbytes))


def _entry(file: Path, name: str, value: Any, remedy: str) -> TensorEntry:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.is_contiguous():
        raise ModelSourceError(f"{file}: {name} is not a tensor whose elements lie in order; {remedy}")
    if value.dtype not in STORED_NAMES:
        raise ModelSourceError(f"{file}: {name} has the type {value.dtype}; {remedy}")
    begin: Any = value.untyped_storage()._checkpoint_offset  # set by torch.load onto meta
    offset = begin + int(value.storage_offset()) * value.element_size()
    return TensorEntry(name, file, STORED_NAMES[value.dtype], tuple(value.shape), offset, value.nbytes)
