"""Index, files and headers are compared in both directions before a weight is read; any offset works."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.models import edit_json, save_model

from tierstream.engine.weights.safetensors_dir import INDEX_FILE, open_checkpoint
from tierstream.io import seam
from tierstream.io.errors import ModelSourceError, StorageError
from tierstream.io.posix import PosixBackend

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="session")
def sharded_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    save_model(path, shard="90KB")
    assert (path / SECOND).exists()
    assert len(list(path.glob("*.safetensors"))) == 2
    return path


@pytest.fixture
def sharded(sharded_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_source, tmp_path / "model"))


def raw_file(path: Path, tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    """A safetensors file with its tensors in the order given, whatever their alignment."""
    header, end = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors))


def floats(path: Path, name: str, max_elements: int = 1 << 20) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    out = np.full(checkpoint.tensors[name].numel, np.nan, np.float32)
    for start, values in checkpoint.slices(name, max_elements):
        assert values.size <= max_elements
        out[start : start + values.size] = values
    return out


def test_tensors_at_odd_offsets_are_exact_and_bounded(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    numbers, halves = (
        generator.standard_normal(1000, np.float32),
        np.array([1, 0xFFFF, 0x8000, 0x3F80, 0x7F7F, 2, 3], "<u2"),
    )
    raw_file(
        tmp_path / "model.safetensors",
        [
            ("z", "U8", [3], b"\x01\x02\x03"),
            ("a", "F32", [10, 100], numbers.tobytes()),
            ("m", "BF16", [7], halves.tobytes()),
            ("empty", "F16", [0, 4], b""),
        ],
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["a"].offset % 4 != 0
    assert checkpoint.read("z").tobytes() == b"\x01\x02\x03"
    for max_elements in (1, 7, 333, 1000, 10**9):
        np.testing.assert_array_equal(floats(tmp_path, "a", max_elements), numbers)
        got = floats(tmp_path, "m", max_elements).view(np.uint32)
        np.testing.assert_array_equal(got, halves.astype(np.uint32) << 16)
    assert floats(tmp_path, "empty").size == 0


def test_reading_takes_no_more_than_its_two_buffers(tmp_path: Path) -> None:
    """A tensor of 32 MiB at an odd offset, within 1 MiB."""
    values = np.arange(8 << 20, dtype=np.float32)
    raw_file(
        tmp_path / "model.safetensors",
        [("odd", "U8", [1], b"x"), ("big", "F32", [8 << 20], values.tobytes())],
    )
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    total = 0.0
    for start, part in checkpoint.slices("big", (1 << 20) // 9):
        total += float(part[0]) - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 0.0
    assert peak < 1 << 20


@pytest.mark.parametrize(("stored", "dtype"), [("F16", np.float16), ("F64", np.float64), ("F32", np.float32)])
def test_every_float_type_is_cast(tmp_path: Path, stored: str, dtype: type) -> None:
    values = np.random.default_rng(2).standard_normal(513).astype(dtype)
    raw_file(tmp_path / "weights.safetensors", [("w", stored, [513], values.tobytes())])
    np.testing.assert_array_equal(floats(tmp_path, "w", 100), values.astype(np.float32))


def test_short_reads_are_continued(sharded: Path) -> None:
    class SevenBytes(seam.Syscalls):
        def preadv(self, fd: int, buffer: seam.HostBytes, offset: int) -> int:
            return super().preadv(fd, buffer[:7], offset)

    name = "model.norm.weight"
    expected = floats(sharded, name)
    with seam.injected(SevenBytes()):
        np.testing.assert_array_equal(floats(sharded, name), expected)


def test_failed_read_names_file_and_offset(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    entry = checkpoint.tensors["lm_head.weight"]
    with entry.file.open("r+b") as handle:
        handle.truncate(entry.offset + 100)
    with pytest.raises(StorageError, match=f"{entry.file.name} at byte {entry.offset + 100} failed"):
        list(checkpoint.slices("lm_head.weight", 1 << 20))


def _drop_entry(model: Path) -> None:
    edit_json(model / INDEX_FILE, lambda index: index["weight_map"].update({"model.ghost.weight": FIRST}))


def _move_entry(model: Path) -> None:
    edit_json(
        model / INDEX_FILE, lambda index: index["weight_map"].update({"model.embed_tokens.weight": SECOND})
    )


def _rename_in_index(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        def shards(index: dict) -> None:
            index["weight_map"] = {k: name if v == SECOND else v for k, v in index["weight_map"].items()}

        edit_json(model / INDEX_FILE, shards)

    return change


def _truncate(nbytes: int) -> Callable[[Path], None]:
    return lambda model: os.truncate(
        model / SECOND, nbytes if nbytes >= 0 else (model / SECOND).stat().st_size + nbytes
    )


def _append(model: Path) -> None:
    with (model / SECOND).open("ab") as handle:
        handle.write(b"more")


def _dangle(model: Path) -> None:
    (model / SECOND).unlink()
    (model / SECOND).symlink_to("../blobs/0123abc")


DAMAGE: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "shard missing": (lambda m: (m / SECOND).unlink(), ["1 of the 2 shards", SECOND]),
    "shard empty": (_truncate(0), [SECOND, "0 bytes"]),
    "shard cut in its header": (_truncate(50), [SECOND, "50 bytes"]),
    "pointer in place of a shard": (
        lambda root: (root / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        [SECOND, "pointer of Git LFS", "git lfs pull"],
    ),
    "shard cut in its data": (_truncate(-1), [SECOND, "cut off"]),
    "shard too long": (_append, [SECOND, "longer than its header"]),
    "index names a tensor that no shard holds": (
        _drop_entry, [INDEX_FILE, "model.ghost.weight", "no shard holds it"]
    ),
    "index names the wrong shard": (_move_entry, ["model.embed_tokens.weight", SECOND, f"it is in {FIRST}"]),
    "shard that the index does not name": (
        lambda m: shutil.copy(m / SECOND, m / "model-00003-of-00003.safetensors"),
        ["model-00003-of-00003.safetensors", "not named by"],
    ),
    "whole model beside the shards": (
        lambda m: shutil.copy(m / SECOND, m / "model.safetensors"),
        ["model.safetensors", "not named by", "also holds"],
    ),
    "absolute path": (_rename_in_index("/etc/passwd"), ["/etc/passwd", "inside the model directory"]),
    "path upwards": (_rename_in_index(f"../model/{SECOND}"), ["../model", "inside the model directory"]),
    "dangling link": (_dangle, [SECOND, "../blobs/0123abc", "No such file"]),
    "index is no JSON": (lambda m: (m / INDEX_FILE).write_text("{"), [INDEX_FILE, "no index"]),
    "index without a map": (lambda m: (m / INDEX_FILE).write_text("{}"), [INDEX_FILE, "weight_map"]),
    "index dangles": (
        lambda m: ((m / INDEX_FILE).unlink(), (m / INDEX_FILE).symlink_to("gone.json")),
        [INDEX_FILE, "gone.json"],
    ),
    "shards without an index": (
        lambda m: (m / INDEX_FILE).unlink(), ["2 safetensors files", FIRST, INDEX_FILE]
    ),
    "no weights at all": (lambda m: [f.unlink() for f in m.glob("*.safetensors*")], ["no safetensors file"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_directories_are_refused_by_name(sharded: Path, damage: str) -> None:
    """C65."""
    change, words = DAMAGE[damage]
    change(sharded)
    with pytest.raises(ModelSourceError) as caught:
        open_checkpoint(sharded)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


HEADERS = {
    "not JSON": b"{{{{{{{{",
    "a list": b"[1, 2, 3]",
    "no offsets": b'{"w": {"dtype": "F32", "shape": [1]}}',
    "unknown type": b'{"w": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
    "negative size": b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "size is not the shape's": b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    "gap": b'{"w": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}',
    "overlap": b'{"v": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
    b' "w": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}',
    "end before begin": b'{"w": {"dtype": "U8", "shape": [0], "data_offsets": [4, 0]}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_refused_by_name(tmp_path: Path, case: str) -> None:
    text = HEADERS[case]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(ModelSourceError, match=r"model\.safetensors has a damaged header"):
        open_checkpoint(tmp_path)


def test_absurd_header_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ModelSourceError, match="not a safetensors file"):
        open_checkpoint(tmp_path)


def test_other_file_names_and_unrelated_files_are_fine(sharded: Path) -> None:
    """`model.safetensors-00001-of-00002.safetensors` is a name that exists in the wild."""
    expected = {name: floats(sharded, name) for name in open_checkpoint(sharded).tensors}
    renamed = {FIRST: "model.safetensors-00001-of-00002.safetensors", SECOND: "deep/second.safetensors"}
    (sharded / "deep").mkdir()
    for old, new in renamed.items():
        (sharded / old).rename(sharded / new)
    edit_json(
        sharded / INDEX_FILE,
        lambda index: index.update(weight_map={k: renamed[v] for k, v in index["weight_map"].items()}),
    )
    raw_file(sharded / "adapter_model.safetensors", [("lora", "U8", [1], b"x")])
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.tensors.keys() == expected.keys()
    assert checkpoint.unnamed_files == ("adapter_model.safetensors",)
    for name, values in expected.items():
        np.testing.assert_array_equal(floats(sharded, name), values)


def test_cache_of_links_that_nobody_may_write(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache: relative links to blobs, read-only, seen from another working directory (C73)."""
    expected = {name: floats(sharded, name) for name in open_checkpoint(sharded).tensors}
    blobs, cache = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    cache.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        blob = blobs / f"{number:040x}"
        shutil.copy(file, blob)
        blob.chmod(0o444)
        (cache / file.name).symlink_to(Path("../../blobs") / blob.name)
        if os.geteuid() == 0:  # somebody else downloaded it
            os.chown(blob, 12345, 12345)
            os.chown(cache / file.name, 12345, 12345, follow_symlinks=False)
    before = {path: path.stat().st_mtime_ns for path in [*blobs.iterdir(), blobs, cache]}
    cache.chmod(0o555)
    blobs.chmod(0o555)
    try:
        monkeypatch.chdir(cache.parent)
        checkpoint = open_checkpoint("main")
        monkeypatch.chdir("/")
        for name, values in expected.items():
            got = np.concatenate([part.copy() for _, part in checkpoint.slices(name, 1000)])
            np.testing.assert_array_equal(got, values)
        assert {path: path.stat().st_mtime_ns for path in [*blobs.iterdir(), blobs, cache]} == before
    finally:
        cache.chmod(0o755)
        blobs.chmod(0o755)


def test_direct_io_through_a_link(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(Path("model") / FIRST)
    backend, out = PosixBackend(threads=1), np.empty((sharded / FIRST).stat().st_size, np.uint8)
    backend.open(tmp_path / "link", writable=False).read_into(out, 0).result()
    backend.close()
    assert out.tobytes() == (sharded / FIRST).read_bytes()


@pytest.mark.parametrize("path", ["gone", "file"])
def test_model_path_must_be_a_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelSourceError, match=f"model directory {tmp_path / path}"):
        open_checkpoint(tmp_path / path)
