"""The directory as others see it: zarr-python, tensorstore, the file system, a second process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from support.faults import FaultySyscalls, fail
from support.stores import PAGE_BYTES, all_pages, drives_in, layout_of, mixed_layout

from tierstream.io import seam
from tierstream.io.errors import ConfigError, StorageError
from tierstream.io.posix import PosixBackend
from tierstream.tiered import bfloat16
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.store import Intent, Store
from tierstream.tiered.zarrdir import ZarrDirectory

LAYOUT = mixed_layout()


@pytest.fixture
def backend() -> Iterator[PosixBackend]:
    backend = PosixBackend(threads=2)
    yield backend
    backend.close()


def store_in(roots: list[Path], backend: PosixBackend, layout: Layout = LAYOUT, frames: int = 6) -> Store:
    return Store(
        layout,
        dram_bytes=frames * layout.page_bytes,
        directory=ZarrDirectory.create(drives_in(roots, backend), layout, {"model": "test"}),
        prefetch_bytes=0,
        writeback_bytes=2 * layout.page_bytes,
    )


def fill(store: Store, seed: int) -> dict[tuple[str, str], np.ndarray]:
    """Random bits, NaN patterns too, in all durable planes; returned as arrays of the planes' dtypes."""
    random = np.random.default_rng(seed)
    values = {}
    for key, spec in store.layout.planes.items():
        if spec.durable:
            dtype = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype
            values[key] = np.frombuffer(random.bytes(spec.nbytes), dtype=np.uint8).view(dtype)
            store.write_range(*key, 0, values[key])
    store.flush()
    return values


def same_bits(got: object, expected: np.ndarray) -> bool:
    array = np.ascontiguousarray(got)  # type: ignore[call-overload]
    return array.dtype == expected.dtype and array.tobytes() == expected.tobytes()


def open_tensorstore(path: Path) -> tensorstore.TensorStore:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return tensorstore.open(spec, open=True).result()


@pytest.mark.parametrize("drives", [1, 2, 3])
def test_zarr_and_tensorstore_read_the_store(tmp_path: Path, backend: PosixBackend, drives: int) -> None:
    roots = [tmp_path / f"drive{number}" for number in range(drives)]
    with store_in(roots, backend) as store:
        values = fill(store, seed=drives)
        group = zarr.open_group(roots[0], mode="r")
        assert group.attrs["model"] == "test"
        for (unit, plane), expected in values.items():
            array = group[f"{unit}/{plane}"]
            assert same_bits(array[:], expected)
            assert same_bits(array[5:20], expected[5:20])
            assert same_bits(open_tensorstore(roots[0] / unit / plane).read().result(), expected)
            tensor = {"name": f"{unit}.{plane}", "shape": [len(expected)], "offset": 0}
            assert array.attrs["tensors"] == [tensor]
        grad = group["layers.0/grad"]
        assert not grad[:].astype(np.float32).any(), "never spilled: zeros, and no file"


def test_chunk_files_are_reserved_and_hold_raw_pages(tmp_path: Path, backend: PosixBackend) -> None:
    with store_in([tmp_path], backend) as store:
        for page in all_pages(LAYOUT):
            path = tmp_path / page.unit / page.plane / "c" / str(page.index)
            if not LAYOUT.spec(page.unit, page.plane).durable:
                assert not path.exists()
                continue
            assert path.stat().st_size == LAYOUT.page_nbytes(page)
            assert path.stat().st_blocks * 512 >= LAYOUT.page_nbytes(page)
        values = fill(store, seed=3)
        raw = values["layers.2", "weight"].tobytes()
        files = [tmp_path / f"layers.2/weight/c/{index}" for index in range(4)]
        assert b"".join(file.read_bytes() for file in files) == raw.ljust(4 * PAGE_BYTES, b"\0")
        assert (tmp_path / "layers.2/norm/c/0").read_bytes() == values["layers.2", "norm"].tobytes()


def test_pages_are_spread_by_bytes_and_linked_from_the_first_root(
    tmp_path: Path, backend: PosixBackend
) -> None:
    roots = [tmp_path / f"drive{number}" for number in range(3)]
    layout = layout_of(("u", "weight", "float32", 30 * 1024, True), ("u", "grad", "float32", 9 * 1024, False))
    with store_in(roots, backend, layout, frames=2) as store:
        for page in all_pages(layout, durable=False):
            store.acquire([(page, Intent.OVERWRITE)]).release()
        fill(store, seed=0)
        for root in roots:
            own = [path for path in root.glob("u/weight/c/*") if not path.is_symlink()]
            assert len(own) == 10
        links = [path for path in roots[0].glob("u/weight/c/*") if path.is_symlink()]
        assert len(links) == 20
        assert all(path.resolve().parent != path.parent for path in links)
        spilled = list(roots[0].glob("u/grad/c/*"))
        assert len(spilled) >= 7


def test_step_local_pages_are_spilled_and_read_back(tmp_path: Path, backend: PosixBackend) -> None:
    layout = layout_of(("u", "grad", "uint8", 8 * PAGE_BYTES, False))
    with store_in([tmp_path], backend, layout, frames=2) as store:
        for version in range(3):
            for page in all_pages(layout):
                with store.acquire([(page, Intent.OVERWRITE)]) as lease:
                    lease.arrays[0].fill(version * 10 + page.index)
            for page in all_pages(layout):
                with store.acquire([(page, Intent.CONSUME)]) as lease:
                    assert (lease.arrays[0] == version * 10 + page.index).all()
        assert store.stats.frames_in_use == 0


def test_hundreds_of_arrays_are_made_in_a_moment(tmp_path: Path, backend: PosixBackend) -> None:
    layout = layout_of(
        *((f"layers.{unit}", plane, "float32", 4096, True) for unit in range(100) for plane in "abcd")
    )
    begun = time.process_time()  # what others do on this machine does not count
    ZarrDirectory.create(drives_in([tmp_path], backend), layout, {}).close()
    assert time.process_time() - begun < 3
    assert len(list(tmp_path.glob("*/*/c/*"))) == 1600


# Refusals


def test_a_drive_that_is_too_small_is_refused_before_anything_is_made(
    tmp_path: Path, backend: PosixBackend
) -> None:
    class Small(FaultySyscalls):
        def statvfs(self, path: str) -> os.statvfs_result:
            real = list(super().statvfs(path))
            real[4] = 10  # f_bavail, in blocks of f_frsize
            return os.statvfs_result(real)

    need = LAYOUT.nbytes(durable=True)
    with seam.injected(Small()), pytest.raises(StorageError, match=rf"\({need} bytes\) are needed.*are free"):
        ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {})
    assert not list(tmp_path.glob("layers*"))
    ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {}).close()


def test_space_that_runs_out_while_reserving_is_named(tmp_path: Path, backend: PosixBackend) -> None:
    with (
        seam.injected(FaultySyscalls(fail(errno.ENOSPC, on="posix_fallocate", at=9))),
        pytest.raises(StorageError, match="No space left"),
    ):
        ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {})
    # The next start removes what is there and is not kept out by a lock.
    with store_in([tmp_path], backend) as store:
        fill(store, seed=0)


def test_a_file_system_without_links_is_named(tmp_path: Path, backend: PosixBackend) -> None:
    """FAT and exFAT: chunk files on the second drive cannot be linked from the first."""
    roots = [tmp_path / "a", tmp_path / "b"]
    with (
        seam.injected(FaultySyscalls(fail(errno.EPERM, on="symlink", at=3))),
        pytest.raises(StorageError, match=rf"linking {roots[0]}/.*/c/\d+ failed.*Operation not permitted"),
    ):
        ZarrDirectory.create(drives_in(roots, backend), LAYOUT, {})
    with store_in(roots, backend) as store:
        fill(store, seed=0)


def test_two_stores_do_not_share_a_directory(tmp_path: Path, backend: PosixBackend) -> None:
    shared = tmp_path / "shared"
    with store_in([tmp_path / "own", shared], backend) as store:
        values = fill(store, seed=0)
        with pytest.raises(StorageError, match=rf"process {os.getpid()} is using this directory"):
            ZarrDirectory.create(drives_in([tmp_path / "other", shared], backend), LAYOUT, {})
        child = subprocess.run(
            [sys.executable, "-c", _SECOND_RUN, str(shared)], capture_output=True, text=True, check=False
        )
        assert "is using this directory" in child.stderr, child.stderr
        key = ("layers.0", "exp_avg")
        out = np.empty_like(values[key])
        store.read_range(*key, 0, out)
        assert same_bits(out, values[key])
    ZarrDirectory.create(drives_in([tmp_path / "other", shared], backend), LAYOUT, {}).close()


_SECOND_RUN = """
import sys
from tierstream.io.drives import Drive
from tierstream.io.posix import PosixBackend
from tierstream.tiered.layout import Layout
from tierstream.tiered.zarrdir import ZarrDirectory
ZarrDirectory.create([Drive(sys.argv[1], PosixBackend(threads=1))], Layout(4096, {}), {})
"""


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a", "b", "link"]])
def test_directories_are_named_once(tmp_path: Path, backend: PosixBackend, names: list[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="at least one, each of them once"):
        ZarrDirectory.create(drives_in([tmp_path / name for name in names], backend), LAYOUT, {})


def test_an_old_store_is_removed_and_other_files_are_not(tmp_path: Path, backend: PosixBackend) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "layers.9").mkdir()
    with store_in([tmp_path], backend) as store:
        fill(store, seed=0)
    few = layout_of(("layers.0", "weight", "float32", 10, True))
    with store_in([tmp_path], backend, few):
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / "layers.9").is_dir()
        assert not (tmp_path / "layers.1").exists()
        array = zarr.open_array(tmp_path / "layers.0/weight", mode="r")
        assert array.shape == (10,)
        assert not array[:].any()


def test_a_foreign_zarr_group_is_not_taken_over(tmp_path: Path, backend: PosixBackend) -> None:
    group = zarr.create_group(tmp_path)
    group.create_array("layers.0", shape=(3,), dtype="float32")[:] = 1
    with pytest.raises(StorageError, match="belongs to something else"):
        ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {})
    assert zarr.open_array(tmp_path / "layers.0", mode="r")[0] == 1


@pytest.mark.parametrize("unit", ["..", "", "a/b", 3])
def test_a_damaged_list_of_units_removes_nothing(tmp_path: Path, backend: PosixBackend, unit: object) -> None:
    attributes = {"tierstream_store": {"units": [unit]}}
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "precious").write_text("x")
    (root / "zarr.json").write_text(json.dumps({"attributes": attributes}))
    with pytest.raises(StorageError, match="damaged"):
        ZarrDirectory.create(drives_in([root], backend), LAYOUT, {})
    assert (tmp_path / "precious").read_text() == "x"


# bfloat16


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in equal:RuntimeWarning"
)  # zarr compares with NaN
def test_every_bfloat16_survives_zarr_and_tensorstore(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16)
    array = zarr.create_array(
        tmp_path / "z", shape=values.shape, chunks=(4096,), dtype=values.dtype, compressors=None, fill_value=0
    )
    array[:] = values
    assert same_bits(zarr.open_array(tmp_path / "z", mode="r")[:], values)
    assert same_bits(open_tensorstore(tmp_path / "z").read().result(), values)
    assert array.metadata.to_dict()["data_type"] == "bfloat16"


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x0001])
def test_fill_values_survive_json(bits: int) -> None:
    dtype = bfloat16.BFloat16()
    value = np.array(bits, dtype=np.uint16).view(ml_dtypes.bfloat16)[()]
    text = json.dumps(dtype.to_json_scalar(value, zarr_format=3), allow_nan=False)
    back = dtype.from_json_scalar(json.loads(text), zarr_format=3)
    assert int(np.asarray(back).view(np.uint16)) == bits


def test_fill_values_of_tensorstore_are_read(tmp_path: Path) -> None:
    for fill in ("NaN", "Infinity", "-Infinity", 1.5):
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/{fill}/"},
            "metadata": {"shape": [3], "data_type": "bfloat16", "fill_value": fill},
        }
        tensorstore.open(spec, create=True).result()
        read = zarr.open_array(tmp_path / str(fill), mode="r")[:].astype(np.float32)
        assert np.array_equal(read, np.full(3, float(fill), np.float32), equal_nan=True)


def test_other_types_are_not_taken_for_bfloat16() -> None:
    with pytest.raises(ValueError, match="float16"):
        bfloat16.BFloat16.from_native_dtype(np.dtype("float16"))
    with pytest.raises(ValueError, match="float8"):
        bfloat16.BFloat16.from_json("float8", zarr_format=3)
    with pytest.raises(TypeError):
        bfloat16.BFloat16().cast_scalar("one")


def test_the_data_type_is_announced_to_zarr() -> None:
    (found,) = entry_points(group="zarr.data_type", name="bfloat16")
    assert found.load() is bfloat16.BFloat16


def test_page_paths(tmp_path: Path, backend: PosixBackend) -> None:
    directory = ZarrDirectory.create(drives_in([tmp_path], backend), LAYOUT, {})
    assert directory.path(Page("layers.0", "weight", 2)) == f"{tmp_path}/layers.0/weight/c/2"
    directory.close()
    directory.close()
