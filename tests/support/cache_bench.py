"""The store's state machine on a bench: no threads, and transfers end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

from support.stores import PAGE_BYTES, all_pages, uniform_layout

from tierstream.tiered.cache import Cache, Kind, Transfer
from tierstream.tiered.frames import UniformPool
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.lease import Intent, Lease
from tierstream.tiered.policy import POLICIES
from tierstream.tiered.prefetch import Schedule
from tierstream.tiered.stats import StoreStats


class Bench:
    """A cache whose transfers end when the test says so."""

    def __init__(
        self,
        layout: Layout,
        frames: int,
        *,
        prefetch: int = 0,
        writeback: int = 100,
        policy: str = "lookahead",
    ) -> None:
        self.layout = layout
        self.stats = StoreStats()
        self.transfers: list[Transfer] = []
        self.log: list[tuple[Kind, int]] = []
        self.cache = Cache(
            layout,
            UniformPool(layout, frames * PAGE_BYTES),
            POLICIES[policy],
            prefetch_bytes=prefetch * PAGE_BYTES,
            writeback_bytes=writeback * PAGE_BYTES,
            debug=True,
            stats=self.stats,
            issue=self._issue,
        )

    def _issue(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self.log.append((transfer.kind, transfer.entry.page.index))

    def release(self, lease: Lease) -> None:
        self.cache.release(lease)

    def ask(self, *uses: tuple[Page, Intent], scheduled: bool = True) -> Lease:
        entries = [self.cache.entry(page) for page, _ in uses]
        lease = Lease(self, [page for page, _ in uses], entries, [intent for _, intent in uses], scheduled)
        self.cache.submit(lease)
        return lease

    def use(self, page: Page, intent: Intent = Intent.READ, *, scheduled: bool = True) -> None:
        """One whole lease; transfers that it needs end."""
        lease = self.ask((page, intent), scheduled=scheduled)
        while not lease.granted or lease.unfilled:
            for entry in lease.zeroes:
                self.cache.filled(entry)
            lease.zeroes = []
            if not lease.granted or lease.unfilled:
                self.end(0)
        self.release(lease)

    def end(self, index: int = 0) -> None:
        self.cache.complete(self.transfers.pop(index))

    def end_all(self) -> None:
        while self.transfers:
            self.end()

    def begin(self, step: Sequence[Page], following: Sequence[Page] = ()) -> None:
        self.cache.begin(Schedule(step, following))

    def resident(self) -> set[int]:
        return {entry.page.index for entry in self.cache._entries.values() if entry.frame is not None}

    def fill(self, pages: Sequence[Page]) -> None:
        """Give the pages content on NVMe."""
        for page in pages:
            self.use(page, Intent.OVERWRITE, scheduled=False)
            self.cache.write_back([self.cache.entry(page)])
            self.end_all()
        self.log.clear()


def bench(pages: int, frames: int, **settings: int | str) -> tuple[Bench, list[Page]]:
    """All pages have content on NVMe, and the last ones are in DRAM."""
    layout = uniform_layout(pages)
    it = Bench(layout, frames, **settings)  # type: ignore[arg-type]
    it.fill(all_pages(layout))
    return it, all_pages(layout)
