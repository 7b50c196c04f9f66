"""The thread pool through the life of a process: fork, and exit while daemon threads are at work."""

import subprocess
import sys

PRELUDE = """
import os, sys, threading
import numpy as np
from tierstream._native import sum_squares
x = np.ones(1_000_000, np.float32)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_forked_child_has_a_pool_of_its_own() -> None:
    code = """
assert sum_squares(x, threads=4) == 1e6
child = os.fork()
if child == 0:
    print("child", sum_squares(x, threads=4), flush=True)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("parent", sum_squares(x, threads=4))
"""
    assert run(code).split() == ["child", "1000000.0", "parent", "1000000.0"]


def test_exit_joins_the_workers_while_a_daemon_thread_computes() -> None:
    code = """
started = threading.Event()
def work():
    while True:
        sum_squares(x, threads=4)
        started.set()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
print("done")
"""
    for _ in range(5):
        assert run(code) == "done\n"


def test_workers_start_when_first_wanted() -> None:
    code = """
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
sum_squares(x, threads=1)
alone = threads()
sum_squares(x, threads=4)
sum_squares(x, threads=2)
print(alone - before, threads() - before)
"""
    assert run(code).split() == ["0", "3"]


def test_many_threads_on_one_core() -> None:
    """C89: a container that grants one core of many; the result is that of one thread."""
    code = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
x = np.random.default_rng(0).standard_normal(1_000_000, np.float32)
print(sum_squares(x, threads=64) == sum_squares(x, threads=1))
"""
    assert run(code) == "True\n"


def test_workers_stand_back_for_the_threads_that_call() -> None:
    """A worker names itself and stands back when it first runs, which may be after the work is done."""
    code = """
import time
sum_squares(x, threads=3)
for _ in range(3000):
    nice = {}
    for task in os.listdir("/proc/self/task"):
        name = open(f"/proc/self/task/{task}/comm").read().strip()
        nice.setdefault(name, []).append(os.getpriority(os.PRIO_PROCESS, int(task)) - os.nice(0))
    workers = nice.pop("tierstream-cpu", [])
    if workers == [10, 10]:
        break
    time.sleep(0.01)
print(workers, set(sum(nice.values(), [])))
"""
    assert run(code) == "[10, 10] {0}\n"
