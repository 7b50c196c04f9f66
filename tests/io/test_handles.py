"""Handles that stay open: bounded for all caches together, the least recently used closed first."""

from __future__ import annotations

from weakref import WeakSet

import pytest

from tierstream.io import handles
from tierstream.io.handles import HandleCache


def use(cache: HandleCache[int, int], *keys: int) -> None:
    for key in keys:
        with cache.borrow(key, lambda key=key: key) as handle:  # type: ignore[misc]
            assert handle == key


def test_the_least_recently_used_is_closed_first() -> None:
    closed: list[int] = []
    cache: HandleCache[int, int] = HandleCache(8, lambda key, handle: closed.append(handle))
    use(cache, *range(8), 0, 8, 9)
    assert closed == [1, 2]
    assert len(cache) == 8
    cache.close()
    assert sorted(closed) == list(range(10))


def test_caches_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several drives must not use up what `ulimit -n` grants."""
    monkeypatch.setattr(handles, "_CACHES", WeakSet())
    caches = [HandleCache[int, int](32, lambda key, handle: None) for _ in range(3)]
    for cache in caches:
        use(cache, *range(50))
    assert [len(cache) for cache in caches] == [32 // 3] * 3
    caches.pop().close()
    for cache in caches:
        use(cache, *range(50))
        assert len(cache) == 16
    for cache in caches:
        cache.close()
    assert len(handles._CACHES) == 0


def test_a_handle_in_use_is_never_closed() -> None:
    closed: list[int] = []
    cache: HandleCache[int, int] = HandleCache(8, lambda key, handle: closed.append(handle))
    with cache.borrow(99, lambda: 99):
        use(cache, *range(20))
        assert 99 not in closed
    cache.close()
    assert sorted(closed) == [*range(20), 99]
