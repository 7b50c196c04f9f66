"""`tierstream bench storage` refused: one line, with the value and what to do, before anything is written."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drive_kinds import small_ext4
from support.faults import Call, FaultySyscalls
from support.storage_bench import TINY, StorageBench, everything_under, unexpected

from tierstream.io import seam
from tierstream.io.kvikio_backend import cuda_device_present, kvikio_problem
from tierstream.tools.bench.fio import find_fio

no_cuda = pytest.mark.skipif(cuda_device_present(), reason="has a GPU")


def nothing_is_written(call: Call) -> None:
    """A fault that lets a test fail where a scratch folder is made."""
    assert call.name != "mkdir", call


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Iterator[StorageBench]:
    with seam.injected(FaultySyscalls(nothing_is_written)):
        yield StorageBench(capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--file-size 64KiB --block 128KiB", "file_size is 64 KiB, less than a block or page of 128 KiB"),
        ("--file-size 32KiB", "file_size is 32 KiB, less than a block or page of 64 KiB"),
        ("--file-size 4MB5", '--file-size is "4MB5"; it must be a size such as 8GiB'),
        ("--block 1000", "block and page sizes must be positive multiples of 4096 bytes, not 1 kB"),
        ("--block 0", "block is 0"),
        ("--block 64KiB 65536", "name at least one value, each of them once"),
        ("--page 4097", "multiples of 4096 bytes, not 4097"),
        ("--threads 0", "threads is 0; it must be >= 1"),
        ("--threads 1 -2", "threads is -2; it must be >= 1"),
        ("--threads", "threads is []; name at least one value"),
        ("--queue-depth 0", "queue_depth is 0; it must be >= 1"),
        ("--threads many", '--threads is ["many"]'),
        ("--rounds 0", "--rounds is 0; it must be at least 1"),
        ("--seconds 0", "seconds is 0.0; it must be between 0.01 and 600"),
        ("--seconds nan", '--seconds is "nan"; it must be a finite number'),
        ("--access reed", '--access is ["reed"]; it must be'),
        ("--compare dd", '--compare is "dd"; it must be'),
        ("--backend gds", '--backend is ["gds"]; it must be'),
        ("--thread 3", "unknown option --thread; did you mean --threads?"),
        ("--require_gdss true", "unknown option --require_gdss; did you mean --require-gds?"),
        ("--json /absent/x.json", "--json /absent/x.json: there is no directory /absent; make it first"),
        ("--profile /absent/x.json", "--profile /absent/x.json: there is no directory /absent"),
        ("--profile m.json --access read", "a profile needs read, write and mixed; leave --access out"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(bench: StorageBench, tmp_path: Path, options: str, said: str) -> None:
    bench.refused("storage", tmp_path, *TINY, *options.split(), said=[said])
    assert everything_under(tmp_path) == {}


def test_a_path_must_be_given(bench: StorageBench) -> None:
    bench.refused("storage", said=["PATH is missing; usage: tierstream bench storage PATH... [options]"])
    bench.refused("storage", "--rounds", "2", said=["PATH is missing"])


@pytest.mark.parametrize("again", ["{0}", "{0}/", "{0}/../drive", "{0}-link"])
def test_a_directory_named_twice(bench: StorageBench, tmp_path: Path, again: str) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    (tmp_path / "drive-link").symlink_to(drive)
    bench.refused("storage", drive, again.format(drive), *TINY, said=[str(drive), "name each of them once"])


def test_too_little_space(bench: StorageBench, tmp_path: Path) -> None:
    with small_ext4(tmp_path, 16 << 20) as drive:
        said = [str(drive), "31.75 MiB", "are needed there", "are free", "name a directory on another drive"]
        bench.refused("storage", drive, *TINY, "--file-size", "8MiB", said=said)
        assert everything_under(drive) == {}


def test_a_read_only_directory(bench: StorageBench, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=16m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        said = [str(tmp_path), "Read-only file system", "name another directory"]
        bench.refused("storage", tmp_path, *TINY, said=said)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_all_paths_are_looked_at_before_one_is_written(bench: StorageBench, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    said = [str(missing), "No such file or directory", "create it or name another"]
    bench.refused("storage", tmp_path, missing, *TINY, said=said)
    assert everything_under(tmp_path) == {}


@no_cuda
def test_gds_cannot_be_demanded_without_a_gpu(bench: StorageBench, tmp_path: Path) -> None:
    """C25."""
    said = ["--require-gds: GPUDirect Storage is not available: "]
    bench.refused("storage", tmp_path, *TINY, "--require-gds", "true", said=said)
    assert everything_under(tmp_path) == {}


@no_cuda
def test_device_buffers_need_a_gpu(bench: StorageBench, tmp_path: Path) -> None:
    said = ["device buffers need a CUDA device and the backend kvikio", "choose --buffer host"]
    bench.refused("storage", tmp_path, *TINY, "--buffer", "device", said=said)


@pytest.mark.skipif(not kvikio_problem(), reason="kvikio works here")
def test_a_backend_that_does_not_work_here(bench: StorageBench, tmp_path: Path) -> None:
    said = ["the backend kvikio cannot be used: ", kvikio_problem()]
    bench.refused("storage", tmp_path, *TINY[2:], "--backend", "kvikio", said=said)


def test_a_report_does_not_replace_what_is_none(bench: StorageBench, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    said = [f"--report {thesis} holds thesis.tex and is no earlier report", "name a new directory"]
    bench.refused("storage", tmp_path, *TINY, "--report", thesis, said=said)
    assert everything_under(tmp_path) == {str(thesis / "thesis.tex"): b"years of work"}


def test_fio_that_is_not_installed(
    bench: StorageBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    find_fio.cache_clear()
    said = ["--compare fio needs fio, which is not installed: apt-get install fio, or leave the option out"]
    bench.refused("storage", tmp_path, *TINY, "--compare", "fio", said=said)


def test_it_works_with_few_open_files_and_neither_fio_nor_kvikio(tmp_path: Path) -> None:
    """What a plain container has. `tests/faults` has training with few open files."""
    code = (
        "import sys; sys.modules['kvikio'] = None\n"
        "from tierstream.tools.cli import main; sys.exit(main())"
    )  # fmt: skip
    drives = [tmp_path / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "storage", *map(str, drives), *TINY[2:], "--json", "-"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        timeout=60,
    )
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
    assert '"all of them"' in done.stdout
    assert "kvikio" not in done.stdout.replace("--backend", "")
    assert everything_under(tmp_path) == {}
