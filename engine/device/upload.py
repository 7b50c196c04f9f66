"""Fills persistent device buffers from the store's pages, ahead of the computation.

`Uploader` walks a step's list of uploads (weights of a unit, boundary activations) in a thread of its own and
fills slots: byte buffers on the device, in groups of one size. Which upload goes to which slot is decided
before the step, by Belady's rule on the known order (`assign_slots`), so the order of page uses is known to
the store exactly, and timing never changes what happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierstream.engine.device.page_copies import PageCopies
from tierstream.engine.trace.trace import Trace, Track
from tierstream.io.errors import InvariantError
from tierstream.tiered.layout import Layout, Page
from tierstream.tiered.store import Store

if TYPE_CHECKING:
    import torch

    from tierstream.engine.device.device import Device, Event


@dataclass(frozen=True, slots=True)
class Upload:
    """One use of device bytes: plane `plane` of `unit`, in a slot of `group`. `gate` is called with the index
    of each page before it is read, and blocks until it may be.
    """

    unit: str
    plane: str
    group: str
    gate: Callable[[int], None] = lambda page: None

    @property
    def content(self) -> tuple[str, str]:
        return self.unit, self.plane


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where an upload goes. `after`: index of the upload that uses the slot before, -1 if none. `fetch`:
    bytes must move.
    """

    slot: int
    after: int
    fetch: bool


def assign_slots(
    uploads: Sequence[Upload], contents: Sequence[tuple[str, str] | None]
) -> tuple[list[Assignment], list[tuple[str, str] | None]]:
    """Give each upload of one group a slot; returns the assignments and what the slots hold afterwards.

    An upload that finds its bytes in a slot moves nothing. Else it takes the slot whose content is needed
    furthest in the future (never, before all), among equals the one idle longest; the slot of the upload just
    before is taken only if there is no other, since it is being computed with.
    """
    held = list(contents)
    last_use = [-1] * len(held)
    uses: dict[tuple[str, str], list[int]] = {}
    for index, upload in enumerate(uploads):
        uses.setdefault(upload.content, []).append(index)

    def badness(slot: int, now: int) -> tuple[bool, float, int]:
        content = held[slot]
        coming = [i for i in uses.get(content, ()) if i > now] if content is not None else []
        just_used = last_use[slot] == now - 1 and now > 0
        return not just_used, coming[0] if coming else float("inf"), -last_use[slot]

    assignments = []
    for index, upload in enumerate(uploads):
        if upload.content in held:
            slot = held.index(upload.content)
            fetch = False
        else:
            slot = max(range(len(held)), key=lambda s: badness(s, index))
            fetch = True
        assignments.append(Assignment(slot, last_use[slot], fetch))
        held[slot] = upload.content
        last_use[slot] = index
    return assignments, held


#: Of each slot of each group what it holds: (unit, plane).
Held = Mapping[str, Sequence[tuple[str, str] | None]]


@dataclass
class StepPlan:
    """Uploads of a step with their slots; `pages` are the page uses that the uploads will make, upload by
    upload.
    """

    uploads: list[Upload]
    assignments: list[Assignment]
    held_after: Held = field(repr=False)

    def pages(self, layout: Layout, index: int) -> list[Page]:
        upload = self.uploads[index]
        return layout.pages(upload.unit, upload.plane) if self.assignments[index].fetch else []


def nothing_held(groups: Mapping[str, tuple[int, int]], resident: Collection[str]) -> Held:
    """Slots in which no byte is right but for the weights of units that stay.

    Args:
        groups: name -> (count, bytes of one slot). resident: units whose weights are in the one slot of their
            group.
    """
    return {
        name: [(name, "weight")] if name in resident else [None] * count
        for name, (count, _) in groups.items()
    }


def plan_uploads(uploads: Sequence[Upload], held: Held) -> StepPlan:
    """Slots for a step's uploads, each group by `assign_slots`."""
    by_group: dict[str, list[int]] = {}
    for index, upload in enumerate(uploads):
        by_group.setdefault(upload.group, []).append(index)
    assignments: dict[int, Assignment] = {}
    held_after = dict(held)
    for group, indices in by_group.items():
        chosen, held_after[group] = assign_slots([uploads[i] for i in indices], held[group])
        for index, assignment in zip(indices, chosen, strict=True):
            after = indices[assignment.after] if assignment.after >= 0 else -1
            assignments[index] = Assignment(assignment.slot, after, assignment.fetch)
    return StepPlan(list(uploads), [assignments[index] for index in range(len(uploads))], held_after)


@dataclass
class _Slot:
    buffer: torch.Tensor
    ready: Event | None = None
    idle: Event | None = None


class Uploader:
    """Keeps device slots filled ahead of the computation.

    Args:
        groups: slots of each group: name -> (count, bytes of one slot).
        resident: units whose weights are always in the one slot of their group; someone else puts them there.
    """

    def __init__(
        self,
        device: Device,
        store: Store,
        layout: Layout,
        groups: Mapping[str, tuple[int, int]],
        trace: Trace,
        resident: Collection[str] = (),
    ) -> None:
        self._device, self._trace = device, trace
        self._copies = PageCopies(
            device, device.upload, store, layout, trace, waits=Track.UPLOADER, copies=Track.UPLOAD
        )
        self._slots = {
            name: [_Slot(device.buffer(nbytes)) for _ in range(count)]
            for name, (count, nbytes) in groups.items()
        }
        self._nothing_held = self._held = nothing_held(groups, resident)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploader")
        self._state = threading.Condition()
        self._filled: list[bool] = []
        self._released: list[bool] = []
        self._job: Future[None] | None = None
        self._plan: StepPlan | None = None
        self._error: BaseException | None = None
        self._aborted = False
        self.hits = self.misses = 0

    @property
    def bytes_up(self) -> int:
        """Bytes copied to the device so far."""
        return self._copies.bytes_up

    def plan(self, uploads: Sequence[Upload], *, stale: bool) -> StepPlan:
        """Slots for a step's uploads.

        Args:
            stale: the weights in the slots were updated since, so none of them may be used. Activations never
                outlive a step.
        """
        held = self._nothing_held if stale else _without_activations(self._held)
        return plan_uploads(uploads, held)

    def buffer(self, group: str) -> torch.Tensor:
        """The one slot of a group."""
        (slot,) = self._slots[group]
        return slot.buffer

    def begin(self, plan: StepPlan) -> None:
        """Start filling slots for `plan`; the step before must have released all it took."""
        if self._job is not None:
            raise InvariantError("a step's uploads began before those of the step before were finished")
        self._plan = plan
        self._filled = [False] * len(plan.uploads)
        self._released = [False] * len(plan.uploads)
        self._job = self._thread.submit(self._run, plan)

    def take(self, index: int) -> torch.Tensor:
        """Bytes of upload `index`, ready for the compute lane; blocks the host until the upload has been
        enqueued.
        """
        upload = self._upload(index)
        cause = "activations" if upload.plane == "activation" else "weights"
        with self._trace.stall(cause, upload.unit), self._state:
            self._state.wait_for(lambda: self._filled[index] or self._error is not None)
            if self._error is not None:
                raise self._error
        slot = self._slot(index)
        self._device.compute.wait(slot.ready)
        return slot.buffer

    def release(self, index: int) -> None:
        """The compute lane has been given all that reads upload `index`."""
        slot = self._slot(index)
        slot.idle = self._device.compute.record()
        with self._state:
            self._released[index] = True
            self._state.notify_all()

    def finish(self) -> None:
        """Wait for the step's uploads; raises what made them fail."""
        if self._job is None or self._plan is None:
            return
        job, plan, self._job = self._job, self._plan, None
        job.result()
        self._held = plan.held_after

    def abort(self) -> None:
        """Stop the thread at its next upload after an error elsewhere, so that `close` cannot hang."""
        with self._state:
            self._aborted = True
            self._state.notify_all()

    def close(self) -> None:
        self.abort()
        self._thread.shutdown(wait=True)

    def _upload(self, index: int) -> Upload:
        assert self._plan is not None
        return self._plan.uploads[index]

    def _slot(self, index: int) -> _Slot:
        assert self._plan is not None
        return self._slots[self._upload(index).group][self._plan.assignments[index].slot]

    def _run(self, plan: StepPlan) -> None:
        try:
            for index, (upload, assignment) in enumerate(zip(plan.uploads, plan.assignments, strict=True)):
                self.hits += not assignment.fetch
                self.misses += assignment.fetch
                if assignment.fetch:
                    self._fill(upload, assignment, self._slot(index))
                with self._state:
                    self._filled[index] = True
                    self._state.notify_all()
        except BaseException as error:
            with self._state:
                self._error = error
                self._state.notify_all()
            raise

    def _fill(self, upload: Upload, assignment: Assignment, slot: _Slot) -> None:
        with self._trace.wait(Track.UPLOADER, "slot", upload.unit), self._state:
            self._state.wait_for(
                lambda: self._aborted or assignment.after < 0 or self._released[assignment.after]
            )
            if self._aborted:
                raise InvariantError("uploads were aborted")
        slot.ready = self._copies.fill(slot.buffer, slot.idle, upload.unit, upload.plane, upload.gate)


def _without_activations(held: Held) -> Held:
    return {
        name: [None if content and content[1] == "activation" else content for content in own]
        for name, own in held.items()
    }
