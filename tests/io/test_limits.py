"""Limits of the process, raised in processes of their own."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tierstream.io import handles, limits
from tierstream.io.limits import Limit, locked_memory, open_files, raise_open_files


def raised(soft: int, hard: int) -> list[int]:
    """[what `raise_open_files` gives, soft and hard limit after it, handles of a cache], from these."""
    script = (
        "import resource, sys\n"
        "from tierstream.io.handles import handle_limit\n"
        "from tierstream.io.limits import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
        "print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE), handle_limit())\n"
    )
    command = [sys.executable, "-c", script, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [int(word) for word in done.stdout.split()]


def test_the_soft_limit_becomes_the_hard_one_and_handles_see_it() -> None:
    assert raised(64, 800) == [800, 800, 800, 200]


def test_a_low_hard_limit_stays() -> None:
    assert raised(64, 64) == [64, 64, 64, 16]


@pytest.mark.parametrize(("hard", "wanted"), [(1 << 30, 1_048_576), (resource.RLIM_INFINITY, 1_048_576)])
def test_never_above_the_most_that_is_ever_open(
    monkeypatch: pytest.MonkeyPatch, hard: int, wanted: int
) -> None:
    in_force = [(1024, hard)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: in_force[-1])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda kind, pair: in_force.append(pair))
    assert raise_open_files() == wanted
    assert in_force[1:] == [(wanted, hard)]


@pytest.mark.parametrize("pair", [(2_000_000, 3_000_000), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)])
def test_never_lowered(monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: pair)
    monkeypatch.setattr(limits.resource, "setrlimit", lambda kind, pair: pytest.fail(f"set to {pair}"))
    assert raise_open_files() == (None if pair[0] == resource.RLIM_INFINITY else pair[0])


@pytest.mark.parametrize("error", [PermissionError(1, "not permitted"), ValueError("over the maximum")])
def test_a_refusal_leaves_the_limit(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(kind: int, pair: tuple[int, int]) -> None:
        raise error

    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (100, 4096))
    monkeypatch.setattr(limits.resource, "setrlimit", refuse)
    assert raise_open_files() == 100


def test_unlimited_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (infinity, infinity))
    assert open_files() == locked_memory() == Limit(None, None)
    assert handles.handle_limit() == 256


def test_this_process() -> None:
    assert tuple(open_files()) == resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    assert locked_memory() == (None if soft == unlimited else soft, None if hard == unlimited else hard)


def test_the_command_line_raises_it() -> None:
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "from tierstream.tools.cli import main\n"
        "main(['--version'])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "(512, 512)"
