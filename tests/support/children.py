"""Work in a process of its own that need not import torch again, which takes seconds: a fork of a server that
has imported it and done nothing else.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["support.command", "support.exports", "support.runs", "transformers.models.qwen3.modeling_qwen3"]
)


def in_a_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, what it returns or raises. It must be of a module that the child finds: of
    `support`, not of a test file.
    """
    with ProcessPoolExecutor(1, mp_context=FORKS) as pool:
        return pool.submit(function, *args).result()


def with_few_files(most: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, in a process that from here on has at most so many open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return function(*args)
