"""Weights in files of `torch.save`: the same bits as from safetensors, and no code of the file ever runs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.exports import Loaded
from support.models import different, save_model

from tierstream.engine.weights.safetensors_dir import open_checkpoint
from tierstream.engine.weights.torch_archive import read_archive
from tierstream.io.errors import ModelSourceError


def to_archives(path: Path) -> None:
    """A directory as it was before safetensors: .bin files, with an index if there are several."""
    for file in sorted(path.glob("*.safetensors")):
        name = file.name.replace("model", "pytorch_model", 1)
        torch.save(load_file(file), path / name.replace(".safetensors", ".bin"))
        file.unlink()
    index = path / "model.safetensors.index.json"
    if index.exists():
        content = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (path / "pytorch_model.bin.index.json").write_text(content)
        index.unlink()


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_load_equals_that_of_safetensors(tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    model = save_model(tmp_path, dtype=dtype, shard=shard)
    to_archives(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"whatever")
    loaded = Loaded(tmp_path, low_bits=False)
    assert different(loaded.flat.tensors(), dict(model.named_parameters())) == []


def test_tensors_may_share_a_storage(tmp_path: Path) -> None:
    base = torch.arange(60.0)
    tensors = {
        "a": base[10:20].view(2, 5),
        "all": base,
        "half": base.half(),
        "none": base[:0],
        "b": base[55:],
    }
    torch.save({**tensors, "parameter": torch.nn.Parameter(base[1:2])}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        got = [float(value) for _, values in checkpoint.slices(name, 7) for value in values]
        assert got == tensor.flatten().tolist()
    assert [float(values[0]) for _, values in checkpoint.slices("parameter", 7)] == [1.0]


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def _save(content: Any) -> Callable[[Path], None]:
    return lambda file: torch.save(content, file)


def _cut(file: Path) -> None:
    torch.save({"w": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-100])


NO_ARCHIVES: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (lambda file: torch.save({"w": Evil(file.with_name("ran"))}, file), "reads: its pickle calls "),
    "bare pickle": (lambda file: file.write_bytes(pickle.dumps({"w": 1})), "reads: "),
    "old format": (
        lambda file: torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=False), "reads: "
    ),
    "cut off": (_cut, "reads: "),
    "empty": (Path.touch, "reads: "),
    "a tensor": (_save(torch.ones(3)), "holds a Tensor, not tensors by name"),
    "nested": (_save({"state_dict": {"w": torch.ones(3)}}), "state_dict is not a tensor"),
    "transposed": (_save({"w": torch.ones(3, 4).T}), "w is not a tensor whose elements lie in order"),
    "sparse": (_save({"w": torch.eye(3).to_sparse()}), "w is not a tensor"),
    "odd type": (
        _save({"w": torch.ones(3).to(torch.float8_e5m2fnuz)}), r"w has the type torch\.float8_e5m2fnuz"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_ARCHIVES)
def test_others_are_refused_and_nothing_runs(tmp_path: Path, case: str) -> None:
    make, words = NO_ARCHIVES[case]
    file = tmp_path / "pytorch_model.bin"
    make(file)
    with pytest.raises(ModelSourceError, match=words) as caught:
        read_archive(file)
    assert str(file) in str(caught.value)
    assert "safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_index_and_files_are_compared(tmp_path: Path) -> None:
    save_model(tmp_path, shard="60KB")
    to_archives(tmp_path)
    first, *_, last = sorted(tmp_path.glob("*.bin"))
    shutil.copy(first, tmp_path / "kept")
    first.unlink()
    with pytest.raises(ModelSourceError, match=f"shards that .* names are missing: {first.name}"):
        open_checkpoint(tmp_path)
    shutil.move(tmp_path / "kept", first)
    shutil.copy(last, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelSourceError, match=r"pytorch_model\.bin is not named by .* also holds"):
        open_checkpoint(tmp_path)


def test_safetensors_beside_them_are_taken(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "gone.bin"}}))
    assert open_checkpoint(tmp_path).tensors.keys() == dict(model.named_parameters()).keys()
