"""Files and directories that are complete or not there, whatever stops the process or the machine.

A file (`write_file`):

1. write the bytes to a new file with another name in the same directory, so that the rename stays on one
drive; 2. fsync that file: without it the name could survive a power cut and the bytes not; 3. rename it onto
its name, which is atomic: readers see the old file or the new one; 4. fsync the directory: without it the
rename itself could be lost.

A directory (`publish_directory`): its files and then its directories are synced, deepest first; then steps 3
and 4. A directory is removed (`remove_tree`) by renaming it first: a half-removed one never stands under its
own name.

Source: rename(2), fsync(2); the order is the one of T. Pillai et al., "All File Systems Are Not Created
    Equal", OSDI 2014.
"""

from __future__ import annotations

import errno
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np

from tierstream.io import seam
from tierstream.io.backend import PathLike
from tierstream.io.errors import StorageError, storage_errors
from tierstream.io.transfer import Direction, transfer_all

#: A directory that is being removed has this at the end of its name; one found there was left by a process
#: that died.
REMOVING_SUFFIX = ".removing"
#: Files that are synced at once: a drive makes one flush of several.
_SYNC_THREADS = 8


def write_file(path: PathLike, data: bytes) -> None:
    """Replaces or makes the file `path`, or the one that it is a symbolic link to. After an error or a crash
    it holds either what it held before or `data`.

    Raises:
        StorageError: a step failed, or something else than a regular file has this name, such as a device; no
            temporary file is left behind.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise StorageError("writing", target, detail="it is not a regular file: name another")
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temporary, data)
        _rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            seam.current().unlink(temporary)
        raise
    sync_directory(directory or ".")


def write_link(path: PathLike, target: str) -> None:
    """Makes `path` a symbolic link to `target`, in place of the link that it was; after an error or a crash
    it is one or the other.

    Raises:
        StorageError: a step failed, or `path` is a directory.
    """
    link = os.path.abspath(path)
    temporary = f"{link}.tmp"
    with storage_errors("linking", link):
        with suppress(FileNotFoundError):
            seam.current().unlink(temporary)
        seam.current().symlink(target, temporary)
    _rename(temporary, link)
    sync_directory(os.path.dirname(link))


def publish_directory(temporary: PathLike, final: PathLike, *, replace: bool = False) -> None:
    """Makes the finished directory `temporary`, with all it holds, durable under the name `final` beside it.

    Args:
        replace: a directory of that name is exchanged for the new one, in one step where the file system can
            do that, and then removed.

    Raises:
        StorageError: `final` exists, or a step failed. Up to the rename `temporary` stays as it is.
    """
    source, target = os.fspath(temporary), os.path.abspath(final)
    sync_tree(source)
    replaced = _exists(target)
    if replaced and not replace:
        cause = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        raise StorageError("publishing", target, cause, detail="remove it or choose another name")
    if not replaced:
        _rename(source, target)
    elif not _exchange(source, target):
        _rename(target, target + REMOVING_SUFFIX)
        try:
            _rename(source, target)
        except StorageError:
            _rename(target + REMOVING_SUFFIX, target)
            raise
    sync_directory(os.path.dirname(target))
    if replaced:
        remove_tree(source)
        remove_tree(target + REMOVING_SUFFIX)


def remove_tree(path: PathLike) -> None:
    """Removes a directory and all it holds; symbolic links in it are removed, not followed. No directory is
    fine.

    Raises:
        StorageError: a step failed. After the first one, the rename, the directory is gone from its name;
            calling again goes on with the removal.
    """
    target = os.path.abspath(path)
    doomed = target if target.endswith(REMOVING_SUFFIX) else target + REMOVING_SUFFIX
    if _exists(doomed):
        _remove(doomed)
    if doomed != target and _exists(target):
        _rename(target, doomed)
        sync_directory(os.path.dirname(target))
        _remove(doomed)


def make_directories(path: PathLike) -> None:
    """Makes the directory `path` and those above it that are missing, and makes their names durable."""
    target = os.path.abspath(path)
    if _exists(target):
        return
    parent = os.path.dirname(target)
    make_directories(parent)
    with storage_errors("creating", target), suppress(FileExistsError):
        seam.current().mkdir(target)
    sync_directory(parent)


def sync_directory(path: PathLike) -> None:
    """Makes the names in a directory durable (fsync)."""
    _sync(os.fspath(path), os.O_RDONLY | os.O_DIRECTORY)


def sync_tree(directory: str) -> None:
    """Makes a directory and all that it holds durable (fsync): files, then directories, deepest first."""
    files, directories = _list_tree(directory)
    with ThreadPoolExecutor(_SYNC_THREADS, "tierstream-sync") as pool:
        for _ in pool.map(partial(_sync, flags=os.O_RDONLY), files):
            pass
    for path in reversed(directories):
        sync_directory(path)


def _list_tree(directory: str) -> tuple[list[str], list[str]]:
    """Files, and directories, each before those in it."""
    files, directories = [], [directory]
    for path in directories:  # grows meanwhile
        with storage_errors("listing", path):
            entries = seam.current().scandir(path)
        directories += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        files += [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
    return files, directories


def _write_new(path: str, data: bytes) -> None:
    calls = seam.current()
    with storage_errors("creating", path):
        fd = calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        transfer_all(Direction.WRITE, fd, path, np.frombuffer(data, dtype=np.uint8), 0)
        with storage_errors("syncing", path):
            calls.fsync(fd)
    except BaseException:
        with suppress(OSError):
            calls.close(fd)
        raise
    with storage_errors("closing", path):
        calls.close(fd)


def _rename(source: str, target: str) -> None:
    with storage_errors("renaming", source, detail=f"to {target}"):
        seam.current().rename(source, target)


def _exchange(one: str, other: str) -> bool:
    """Swaps two names in one step; False: it cannot be done here."""
    try:
        seam.current().exchange(one, other)
    except OSError as cause:
        if cause.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise StorageError("exchanging", one, cause, detail=f"with {other}") from cause
    return True


def _exists(path: str) -> bool:
    with storage_errors("looking at", path):
        try:
            seam.current().stat(path)
        except FileNotFoundError:
            return False
    return True


def _sync(path: str, flags: int) -> None:
    calls = seam.current()
    with storage_errors("syncing", path):
        fd = calls.open(path, flags | os.O_CLOEXEC)
        try:
            calls.fsync(fd)
        finally:
            calls.close(fd)


def _remove(directory: str) -> None:
    calls = seam.current()
    with storage_errors("listing", directory):
        entries = calls.scandir(directory)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _remove(entry.path)
        else:
            with storage_errors("removing", entry.path):
                calls.unlink(entry.path)
    with storage_errors("removing", directory):
        calls.rmdir(directory)
