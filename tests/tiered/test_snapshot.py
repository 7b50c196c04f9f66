"""Snapshots: what comes back, for any page size; what is refused, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from support.faults import FaultySyscalls
from support.stores import all_pages, drives_in, layout_of, mixed_layout

from tierstream._native import crc32c
from tierstream.io import seam
from tierstream.io.errors import CheckpointError, InvariantError, StorageError
from tierstream.io.posix import PosixBackend
from tierstream.tiered import bfloat16 as bfloat16  # registers the type
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Faults, Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

STATE = {"step": 7, "rng": [1, 2**70, -0.1], "run_id": "ä", "nested": {"lr": 1e-45, "none": None}}


def bits_dtype(name: str) -> np.dtype:
    return np.dtype("uint16" if name == "bfloat16" else name)


def home_store(layout: Layout) -> Store:
    return Store(layout, dram_bytes=8 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0, debug=True)


def nvme_store(layout: Layout, roots: list[Path], backend: PosixBackend, frames: int = 3) -> Store:
    return Store(
        layout,
        dram_bytes=frames * layout.page_bytes,
        directory=ZarrDirectory.create(drives_in(roots, backend), layout, {}),
        prefetch_bytes=2 * layout.page_bytes,
        writeback_bytes=layout.page_bytes,
        debug=True,
        faults=Faults(0, 0.0005),
    )


def fill(store: Store, seed: int) -> dict[tuple[str, str], np.ndarray]:
    random = np.random.default_rng(seed)
    values = {}
    for key, spec in store.layout.planes.items():
        if spec.durable:
            values[key] = np.frombuffer(random.bytes(spec.nbytes), dtype=bits_dtype(spec.dtype))
            store.write_range(*key, 0, values[key])
    return values


def assert_holds(
    read_range: Callable[[str, str, int, np.ndarray], None], values: dict[tuple[str, str], np.ndarray]
) -> None:
    for key, expected in values.items():
        out = np.empty_like(expected)
        read_range(*key, 0, out)
        assert out.tobytes() == expected.tobytes(), key


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    backend = PosixBackend(threads=2)
    yield backend
    backend.close()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[tuple[str, str], np.ndarray]]:
    """A snapshot of random planes, and what is in them."""
    with home_store(mixed_layout()) as store:
        values = fill(store, 0)
        write_snapshot(store, tmp_path / "snapshot", STATE)
    return tmp_path / "snapshot", values


@pytest.mark.parametrize(
    ("page_bytes", "other_bytes"), [(4096, 4096), (4096, 16384), (16384, 4096), (12288, 8192), (8192, 12288)]
)
@pytest.mark.parametrize("home", [True, False])
def test_round_trip_between_page_sizes_and_places(
    tmp_path: Path, backend: PosixBackend, page_bytes: int, other_bytes: int, home: bool
) -> None:
    source = mixed_layout(page_bytes=page_bytes)
    roots = [tmp_path / "a", tmp_path / "b"]
    with home_store(source) if home else nvme_store(source, roots, backend) as store:
        values = fill(store, page_bytes)
        info = write_snapshot(store, tmp_path / "snapshot", STATE)
        assert_holds(store.read_range, values)
        assert info.nbytes == source.nbytes(durable=True)
        assert info.page_count == len(all_pages(source, durable=True))
    snapshot = Snapshot.open(tmp_path / "snapshot")
    assert snapshot.state == STATE
    assert snapshot.layout.page_bytes == page_bytes
    assert dict(snapshot.planes) == {key: spec for key, spec in source.planes.items() if spec.durable}
    snapshot.verify()
    assert_holds(snapshot.read_range, values)
    target = mixed_layout(page_bytes=other_bytes)
    with nvme_store(target, [tmp_path / "c"], backend) if home else home_store(target) as store:
        fill(store, 1)
        snapshot.restore(store)
        assert_holds(store.read_range, values)


def test_zarr_and_tensorstore_read_a_snapshot(saved: tuple[Path, dict[tuple[str, str], np.ndarray]]) -> None:
    path, values = saved
    group = zarr.open_group(path, mode="r")
    for (unit, plane), expected in values.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{unit}/{plane}/"}}
        for array in (group[f"{unit}/{plane}"][:], tensorstore.open(spec).result().read().result()):
            if plane == "weight":
                assert array.dtype == ml_dtypes.bfloat16
            assert np.ascontiguousarray(array).tobytes() == expected.tobytes()


def test_any_range_can_be_read(saved: tuple[Path, dict[tuple[str, str], np.ndarray]]) -> None:
    path, values = saved
    random = np.random.default_rng(0)
    snapshot = Snapshot.open(path)
    for _ in range(60):
        key = list(values)[random.integers(len(values))]
        start, end = sorted(random.integers(0, len(values[key]) + 1, 2))
        out = np.empty_like(values[key][start:end])
        snapshot.read_range(*key, int(start), out)
        assert out.tobytes() == values[key][start:end].tobytes()
    with pytest.raises(InvariantError, match="not in the layout"):
        snapshot.read_range("layers.0", "grad", 0, np.empty(1, np.uint16))
    with pytest.raises(InvariantError, match=r"\[30, 40\) are not in plane"):
        snapshot.read_range("layers.0", "norm", 30, np.empty(10, np.float32))


def test_pages_never_written_are_zeros_without_a_file(tmp_path: Path) -> None:
    layout = layout_of(("u", "weight", "float32", 5000, True), ("u", "exp_avg", "float32", 5000, True))
    values = np.arange(1000, dtype=np.float32)
    expected = np.zeros(5000, np.float32)
    expected[2000:3000] = values
    with home_store(layout) as store:
        store.write_range("u", "weight", 2000, values)
        info = write_snapshot(store, tmp_path / "snapshot", {})
    assert {path.name for path in (tmp_path / "snapshot").glob("u/*/c/*")} == {"1", "2"}
    assert info.page_count == 2
    snapshot = Snapshot.open(tmp_path / "snapshot")
    snapshot.verify()
    contents = {("u", "weight"): expected, ("u", "exp_avg"): np.zeros(5000, np.float32)}
    assert_holds(snapshot.read_range, contents)
    for page_bytes in (4096, 8192, 12288):
        target = layout_of(
            *((unit, plane, "float32", 5000, True) for unit, plane in layout.planes), page_bytes=page_bytes
        )
        with home_store(target) as store:
            snapshot.restore(store)
            assert not store.has_content(Page("u", "exp_avg", 0)), "zeros are not copied"
            assert_holds(store.read_range, contents)
        with home_store(target) as store:
            fill(store, 0)
            snapshot.restore(store)
            assert_holds(store.read_range, contents)


def test_checksums_are_crc32c(saved: tuple[Path, dict[tuple[str, str], np.ndarray]]) -> None:
    path, _ = saved
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    for plane in manifest["planes"]:
        for index, checksum in enumerate(plane["crc32c"]):
            chunk = (path / plane["unit"] / plane["plane"] / "c" / str(index)).read_bytes()
            assert google_crc32c.value(chunk) == checksum
    data = np.random.default_rng(0).integers(0, 255, 10_001, dtype=np.uint8)
    assert crc32c(data[70:].data, crc32c(data[:70].data)) == google_crc32c.value(data.tobytes())


def test_writing_changes_neither_order_nor_content_of_the_step(tmp_path: Path, backend: PosixBackend) -> None:
    """A snapshot between two uses of a schedule consumes no position, and is no use of a page."""
    layout = mixed_layout()
    with nvme_store(layout, [tmp_path / "a"], backend, frames=8) as store:
        values = fill(store, 0)
        pages = all_pages(layout, durable=True)
        store.begin_step(pages, pages)
        store.acquire([(pages[0], Intent.READ)]).release()
        used = store.stats.hits + store.stats.prefetched + store.stats.misses
        write_snapshot(store, tmp_path / "snapshot", {})
        assert store.stats.hits + store.stats.prefetched + store.stats.misses == used
        assert [store._cache.entry(page).next_use for page in pages] == [len(pages), *range(1, len(pages))]
        assert_holds(store.read_range, values)


def test_temporary_files_lie_beside_the_target(tmp_path: Path) -> None:
    """The last step is a rename in one directory, also where the output is a link to another drive."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "output").symlink_to(tmp_path / "drive")
    calls = FaultySyscalls()
    with home_store(mixed_layout()) as store, seam.injected(calls):
        fill(store, 0)
        write_snapshot(store, tmp_path / "output/deep/snapshot", {})
    created = [call.path for call in calls.calls if call.name in ("mkdir", "rename")]
    assert created
    assert all(path.startswith(f"{tmp_path}/output/deep") for path in created)
    assert os.listdir(tmp_path / "drive/deep") == ["snapshot"]
    Snapshot.open(tmp_path / "drive/deep/snapshot").verify()


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with home_store(mixed_layout()) as store:
        assert write_snapshot(store, "snapshot", {}).path == tmp_path / "snapshot"
    monkeypatch.chdir("/")
    Snapshot.open(tmp_path / "snapshot").verify()


# Refusals


def test_an_existing_path_is_refused_and_not_touched(
    saved: tuple[Path, dict[tuple[str, str], np.ndarray]],
) -> None:
    path, values = saved
    with home_store(mixed_layout()) as store:
        with pytest.raises(CheckpointError, match=f"checkpoint {path} exists: remove it"):
            write_snapshot(store, path, {})
        (path.parent / "file").write_text("x")
        with pytest.raises(CheckpointError, match="exists"):
            write_snapshot(store, path.parent / "file", {})
    assert_holds(Snapshot.open(path).read_range, values)


def test_a_state_that_is_not_json_is_a_bug(tmp_path: Path) -> None:
    with home_store(mixed_layout()) as store, pytest.raises(InvariantError, match="must be JSON"):
        write_snapshot(store, tmp_path / "snapshot", {"array": np.zeros(3)})
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_told_with_both_numbers(tmp_path: Path) -> None:
    class Small(FaultySyscalls):
        def statvfs(self, path: str) -> os.statvfs_result:
            real = list(super().statvfs(path))
            real[4] = 10
            return os.statvfs_result(real)

    with home_store(mixed_layout()) as store:
        fill(store, 0)
        with seam.injected(Small()), pytest.raises(StorageError, match=r"bytes\) are needed there.*are free"):
            write_snapshot(store, tmp_path / "snapshot", {})
    assert not list(tmp_path.iterdir())


def test_not_a_snapshot(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint {tmp_path}/none: there is no such directory"):
        Snapshot.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"is incomplete: .*manifest.json is missing"):
        Snapshot.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: not a manifest"):
        Snapshot.open(tmp_path)


@pytest.mark.parametrize("position", [0.0, 0.1, 0.37, 0.5, 0.81, 0.99])
def test_a_changed_byte_is_found_and_named(
    saved: tuple[Path, dict[tuple[str, str], np.ndarray]], position: float
) -> None:
    path, values = saved
    chunks = sorted(path.glob("*/*/c/*"))
    chunk = chunks[int(position * len(chunks))]
    data = bytearray(chunk.read_bytes())
    data[int(position * len(data))] ^= 0x10
    chunk.write_bytes(data)
    unit, plane, _, index = chunk.relative_to(path).parts
    named = (
        rf"{chunk} is damaged: page {index} of plane {unit}/{plane} has CRC-32C 0x.*use another checkpoint"
    )
    snapshot = Snapshot.open(path)
    with pytest.raises(CheckpointError, match=named):
        snapshot.verify()
    with home_store(mixed_layout(page_bytes=8192)) as store, pytest.raises(CheckpointError, match=named):
        snapshot.restore(store)
    with pytest.raises(CheckpointError, match=named):
        snapshot.read_range(unit, plane, 0, np.empty_like(values[unit, plane]))


def test_missing_and_short_files_are_found_at_opening(
    saved: tuple[Path, dict[tuple[str, str], np.ndarray]],
) -> None:
    path, _ = saved
    chunk = path / "layers.1/exp_avg/c/2"
    chunk.write_bytes(chunk.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=rf"damaged: {chunk} has 100 bytes, its manifest says 4096"):
        Snapshot.open(path)
    chunk.unlink()
    with pytest.raises(CheckpointError, match=rf"incomplete: {chunk} is missing"):
        Snapshot.open(path)


def test_a_changed_manifest_is_found(saved: tuple[Path, dict[tuple[str, str], np.ndarray]]) -> None:
    path, _ = saved
    manifest = path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"step": 7', '"step": 8'))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: its CRC-32C is"):
        Snapshot.open(path)
    manifest.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="damaged: not a manifest"):
        Snapshot.open(path)
    body = json.loads(text)["manifest"]
    body["version"] = 2
    compact = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    manifest.write_text(json.dumps({"crc32c": google_crc32c.value(compact), "manifest": body}))
    with pytest.raises(CheckpointError, match=r"version 2; this program reads .* version 3"):
        Snapshot.open(path)


def test_planes_that_do_not_fit_are_all_named(saved: tuple[Path, dict[tuple[str, str], np.ndarray]]) -> None:
    path, _ = saved
    layout = layout_of(
        *(
            (spec.unit, spec.plane, spec.dtype, spec.numel, spec.durable)
            for spec in mixed_layout(units=2).planes.values()
        ),
        ("layers.2", "weight", "bfloat16", 100, True),
        ("layers.2", "norm", "uint16", 37, True),
        ("layers.3", "weight", "bfloat16", 100, True),
    )
    with home_store(layout) as store:
        values = fill(store, 5)
        with pytest.raises(CheckpointError) as refused:
            Snapshot.open(path).restore(store)
        assert_holds(store.read_range, values)
    text = str(refused.value)
    assert "in 5 planes" in text
    assert "layers.2/weight: 6844 x bfloat16 in the checkpoint, 100 x bfloat16 in this run" in text
    assert "layers.2/norm: 37 x float32 in the checkpoint, 37 x uint16 in this run" in text
    assert "layers.2/exp_avg is only in the checkpoint" in text
    assert "layers.2/master_low is only in the checkpoint" in text
    assert "layers.3/weight is not in the checkpoint" in text


def test_other_tensors_in_a_plane_of_the_same_size_do_not_fit(tmp_path: Path) -> None:
    with home_store(layout_of(("u", "weight", "float32", 10, True))) as store:
        write_snapshot(store, tmp_path / "snapshot", {})
    spec = layout_of(("u", "weight", "float32", 10, True)).spec("u", "weight")
    renamed = type(spec)("u", "weight", "float32", 10, True, ())
    with (
        home_store(Layout(4096, {("u", "weight"): renamed})) as store,
        pytest.raises(
            CheckpointError, match=r"u.weight \[10\] at 0, group 0 in the checkpoint, nothing in this run"
        ),
    ):
        Snapshot.open(tmp_path / "snapshot").restore(store)
