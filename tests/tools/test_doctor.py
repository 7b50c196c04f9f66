"""`tierstream doctor`: what it finds on made-up and real machines, on the screen and as JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierstream.io import probes
from tierstream.io.backend import TransferPath
from tierstream.io.limits import Limit
from tierstream.tools import checks, cli, doctor, quiet
from tierstream.tools.checks import Check, Status

COMMAND = "import sys; from tierstream.tools.cli import main; sys.exit(main())"
NAMES = [
    "cpu", "cpu kernels", "memory", "memory limit", "huge pages", "gpu", "nvidia driver", "cuda of torch",
    "kvikio", "libcufile", "gds", "directory 1", "open files", "locked memory", "versions",
]  # fmt: skip


def by_name(found: Iterator[Check] | list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def squeezed(text: str) -> str:
    """Without white space: lines of the screen are folded anywhere."""
    return "".join(text.split())


def test_json_is_what_the_screen_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    found = checks.collect([str(tmp_path), "/dev/shm", str(tmp_path / "missing")])
    monkeypatch.setattr(doctor, "collect", lambda directories: found)
    statuses = [cli.main(["doctor", "--json"]), cli.main(["doctor"])]
    text, _, screen = capsys.readouterr().out.partition("\n}\n")
    assert statuses == [2, 2]
    report = json.loads(text + "}")
    assert report["status"] == "problem"
    assert max(map(len, screen.splitlines())) <= 80
    # One column: the status and the name stand in the first lines of a value, which follows in full.
    cells = squeezed("\n".join(line[26:] for line in screen.splitlines()))
    for name, check in report["checks"].items():
        assert squeezed(f"{check['status']} {name} {check['value'][:20]}") in squeezed(screen)
        assert squeezed(check["value"] + (f"->{check['remedy']}" if check["remedy"] else "")) in cells
        assert bool(check["remedy"]) == (check["status"] != "ok")
    assert screen.rstrip().splitlines()[-1].startswith("1 problem, ")


def test_keys_and_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "cuda_device_present", lambda: False)
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["status", "checks"]
    assert list(report["checks"]) == NAMES
    assert report["checks"]["directory 1"]["value"].startswith(f"{tmp_path}: ")
    assert f"numpy {metadata.version('numpy')}" in report["checks"]["versions"]["value"]
    assert report["checks"]["gpu"]["status"] == "warning"
    assert list(tmp_path.iterdir()) == []


def test_few_files_and_no_torch_where_there_is_no_gpu(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from tierstream.tools.cli import main\n"
        "status = main()\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)\n"
    )
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", script, "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    files = json.loads(done.stdout)["checks"]["open files"]
    assert files["value"] == "64 (hard limit 64)"
    assert files["status"] == "warning"
    assert "raise the hard limit to 1024 or more" in files["remedy"]


def test_a_name_that_the_screen_cannot_show(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path) + b"/b\xff\xc3\xa4"
    os.mkdir(directory)
    for encoding in ("ascii", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "doctor", directory],
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"},
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert squeezed("b\\udcff") in squeezed(done.stdout.decode(encoding))


def test_options() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "doctor", "--jsno"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tierstream: error: unknown option --jsno; `tierstream doctor --help` lists the known ones\n"
    )


@pytest.mark.parametrize(
    ("statuses", "exit_status", "last_line"),
    [
        ([Status.OK], 0, "no problems, no warnings"),
        ([Status.OK, Status.WARNING, Status.OK], 0, "no problems, 1 warning"),
        ([Status.PROBLEM, Status.WARNING, Status.WARNING], 2, "1 problem, 2 warnings"),
    ],
)
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[Status],
    exit_status: int,
    last_line: str,
) -> None:
    found = [Check(f"check {i}", status, "v", "" if status is Status.OK else "r")
             for i, status in enumerate(statuses)]  # fmt: skip
    monkeypatch.setattr(doctor, "collect", lambda directories: found)
    assert cli.main(["doctor"]) == exit_status
    assert capsys.readouterr().out.splitlines()[-1] == last_line


# Directories


def test_a_missing_directory(tmp_path: Path) -> None:
    check = checks.directory_check(1, str(tmp_path / "missing"))
    assert check.status is Status.PROBLEM
    assert check.value == f"{tmp_path}/missing: cannot be used"
    assert check.remedy.endswith("No such file or directory (errno 2); create it or name another")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    path = "/proc/self" if os.geteuid() == 0 else str(tmp_path)
    tmp_path.chmod(0o500)
    check = checks.directory_check(1, path)
    assert (check.status, check.value) == (Status.PROBLEM, f"{path}: cannot be used")
    assert path in check.remedy


def test_the_current_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    check = checks.directory_check(1, ".")
    assert (check.status, check.value) == (Status.PROBLEM, ".: cannot be used")


def test_a_directory_in_memory_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with quiet.without_warnings():
        check = checks.directory_check(2, "/dev/shm")
    assert (check.name, check.status) == ("directory 2", Status.WARNING)
    assert "tmpfs keeps files in memory" in check.value
    assert check.remedy == "files here take DRAM, not a drive: name a directory on an NVMe drive"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("disk", "status", "text"),
    [
        (probes.Disk("sda", "WD40", True, 1 << 40), Status.WARNING, "sda (WD40, hard disk, 1.00 TiB)"),
        (probes.Disk("nvme0n1", "SSD 990", False, 1 << 40), Status.OK, "nvme0n1 (SSD 990, 1.00 TiB)"),
        (probes.Disk("vda", "", True, 1 << 40), Status.OK, "vda (1.00 TiB)"),  # of a virtual machine
        (probes.Disk("vda", "", None, None), Status.OK, "vda"),
    ],
)
def test_the_drive_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: probes.Disk, status: Status, text: str
) -> None:
    monkeypatch.setattr(probes, "block_device", lambda path, root: probes.BlockDevice(disk.name, (disk,)))
    direct = SimpleNamespace(
        path=str(tmp_path), filesystem="ext4", free_bytes=1 << 30, in_memory=False,
        transfer_path=TransferPath("posix-direct", True),
    )  # fmt: skip
    monkeypatch.setattr(checks, "check_directory", lambda path: direct)
    check = checks.directory_check(1, "x")
    assert check.status is status
    assert check.value == f"{tmp_path}: ext4, {text}, 1.00 GiB free, O_DIRECT"


# The rest of the machine


def test_without_proc_and_sys(tmp_path: Path) -> None:
    assert by_name(checks.memory_checks(tmp_path))["memory"].value == "unknown"
    assert checks.huge_pages_check(tmp_path) == Check("huge pages", Status.OK, "unknown")
    assert by_name(checks.cpu_checks(tmp_path))["cpu"].value.startswith("unknown model, ")
    assert by_name(checks.gpu_checks(False, tmp_path))["nvidia driver"].value == "none"
    usable = len(os.sched_getaffinity(0))
    assert f", {usable} of " in by_name(checks.cpu_checks())["cpu"].value


@pytest.mark.parametrize(("available_gib", "status"), [(20, Status.OK), (3, Status.WARNING)])
def test_little_memory(tmp_path: Path, available_gib: int, status: Status) -> None:
    (tmp_path / "proc").mkdir()
    text = f"MemTotal: {24 << 20} kB\nMemAvailable: {available_gib << 20} kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    found = by_name(checks.memory_checks(tmp_path))
    assert found["memory"].value == f"24.00 GiB, {available_gib}.00 GiB available"
    assert (found["memory limit"].status, found["memory limit"].value) == (status, "none below the host's")


@pytest.mark.parametrize(
    ("isa", "status", "remedy"),
    [("scalar", Status.WARNING, "unset TIERSTREAM_ISA"), ("none", Status.PROBLEM, "unset TIERSTREAM_ISA")],
)
def test_a_lowered_instruction_set(isa: str, status: Status, remedy: str) -> None:
    script = (
        "from tierstream.tools.checks import cpu_checks\n"
        "_, check = cpu_checks()\n"
        "print(check.status, check.remedy)\n"
    )
    environment = os.environ | {"TIERSTREAM_ISA": isa}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{status} {remedy}")


def test_limits() -> None:
    found = by_name(checks.limit_checks(Limit(None, None), Limit(8 << 20, None)))
    assert found["open files"] == Check("open files", Status.OK, "unlimited (hard limit unlimited)")
    assert found["locked memory"].value == "8.00 MiB (hard limit unlimited)"


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", ("numpy", "tierstream-absent"))
    check = checks.versions_check()
    assert (check.status, check.remedy) == (Status.PROBLEM, "pip install tierstream-absent")


# GPU and kvikio, simulated


class FakeCuda:
    """As much of `torch.cuda` as the checks use: one GPU, and host memory that can be pinned or not."""

    def __init__(
        self, *, devices: int = 1, capability: tuple[int, int] = (9, 0), pin_status: int = 0
    ) -> None:
        self.devices, self.capability, self.pin_status = devices, capability, pin_status

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def get_device_properties(self, index: int) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(
            name="NVIDIA H200", total_memory=140 << 30, major=major, minor=minor,
            pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=index,
        )  # fmt: skip

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 139 << 30, 140 << 30

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: self.pin_status,
            cudaHostUnregister=lambda address: 0,
        )


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """GPU checks of a machine with the CUDA described; its GPU computes with the CPU's torch."""
    import torch

    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    for state, width in (("current", "8"), ("max", "16")):
        (device / f"{state}_link_speed").write_text("16.0 GT/s PCIe\n")
        (device / f"{state}_link_width").write_text(f"{width}\n")

    def look(ones: Callable[..., Any] | None = None, cuda: str = "13.0", **facts: Any) -> dict[str, Check]:
        compute = ones or (lambda *shape, dtype, device: torch.ones(*shape, dtype=dtype))
        fake = SimpleNamespace(cuda=FakeCuda(**facts), ones=compute, bfloat16=torch.bfloat16)
        monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
        monkeypatch.setattr(checks, "_cuda_of_torch", lambda: cuda)
        return by_name(checks.gpu_checks(True, tmp_path))

    return look


def test_a_gpu(gpu_machine: Callable[..., dict[str, Check]]) -> None:
    found = gpu_machine()
    about = "NVIDIA H200, 140.00 GiB, compute capability 9.0, 139.00 GiB free"
    assert found["gpu"] == Check("gpu", Status.OK, "1")
    assert found["gpu 0"] == Check("gpu 0", Status.OK, about)
    assert found["gpu 0 link"].status is Status.WARNING
    assert found["gpu 0 link"].value == "PCIe 4.0 x8 now, PCIe 4.0 x16 at most"
    assert found["pinned memory"].status is Status.OK
    assert found["cuda of torch"].value == "13.0"


def test_several_gpus(gpu_machine: Callable[..., dict[str, Check]]) -> None:
    found = gpu_machine(devices=2)
    assert found["gpu"].value == "2; a run uses one"
    assert found["gpu 1 link"] == Check("gpu 1 link", Status.OK, "unknown")


def test_gpus_that_do_not_do(gpu_machine: Callable[..., dict[str, Check]]) -> None:
    def fail(*shape: int, **options: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    assert gpu_machine(capability=(7, 5))["gpu 0"].status is Status.WARNING
    assert gpu_machine(pin_status=2)["pinned memory"].status is Status.WARNING
    broken = gpu_machine(ones=fail)["gpu 0"]
    assert broken.status is Status.PROBLEM
    assert broken.remedy.endswith("(CUDA error: no kernel image is available)")
    unseen = gpu_machine(devices=0)["gpu"]
    assert (unseen.status, unseen.value) == (
        Status.PROBLEM, "present, but torch cannot use it: torch does not say why",
    )  # fmt: skip
    cpu_build = gpu_machine(cuda="")
    assert cpu_build["gpu"].status is Status.PROBLEM
    assert cpu_build["cuda of torch"].value == "none"


class FakeBackend:
    opened = 0

    def __init__(self, *, threads: int) -> None:
        FakeBackend.opened += 1

    def device_path(self, posix: TransferPath) -> TransferPath:
        return self.path

    def close(self) -> None:
        FakeBackend.opened -= 1

    path = TransferPath("gds", True)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (TransferPath("gds", True), "available"),
        (
            TransferPath("kvikio-compat", True, "no GDS driver"),
            "not available (no GDS driver); training does not need it: pages go through DRAM",
        ),
    ],
)
def test_kvikio_is_there(monkeypatch: pytest.MonkeyPatch, path: TransferPath, text: str) -> None:
    monkeypatch.setattr(checks, "kvikio_problem", lambda: "")
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(__version__="26.10.00"))  # type: ignore[arg-type]
    driver = SimpleNamespace(libcufile_version=lambda: (1, 15))
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)  # type: ignore[arg-type]
    monkeypatch.setattr(checks, "KvikioBackend", FakeBackend)
    monkeypatch.setattr(FakeBackend, "path", path)
    found = by_name(checks.kvikio_checks(True))
    assert [found[name].value for name in ("kvikio", "libcufile", "gds")] == ["26.10.00", "1.15", text]
    assert {check.status for check in found.values()} == {Status.OK}
    assert FakeBackend.opened == 0
    assert "no GPU" in by_name(checks.kvikio_checks(False))["gds"].value


def test_kvikio_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "kvikio cannot be imported (No module named 'kvikio'): pip install 'tierstream[kvikio]'"
    monkeypatch.setattr(checks, "kvikio_problem", lambda: reason)
    found = by_name(checks.kvikio_checks(True))
    assert found["kvikio"] == Check("kvikio", Status.WARNING, "not usable; the backend is posix", reason)
    assert "no kvikio" in found["gds"].value


def test_kvikio_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("undefined symbol\nmore")

    monkeypatch.setattr(checks, "kvikio_problem", fail)
    check = by_name(checks.kvikio_checks(True))["kvikio"]
    assert (check.status, "cannot be used (undefined symbol)" in check.remedy) == (Status.WARNING, True)


def test_the_table_on_a_narrow_ascii_stream() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    doctor.print_checks([Check("cpu", Status.OK, "Prozessor für alles")], stream)
    assert b"Prozessor f\\xfcr alles" in stream.buffer.getvalue()  # type: ignore[attr-defined]
