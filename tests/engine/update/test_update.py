"""Who carries out an update, with which bits, and what becomes of a step whose update fails."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.rig import Rig, Setup, batches, keep_gradients, rig, same_bits

from tierstream.engine.device.kernels import cpu_adamw
from tierstream.engine.update import update
from tierstream.engine.update.optimizer import OptimizerConfig
from tierstream.tiered.layout import Page
from tierstream.tiered.store import Intent

#: Whoever waits in vain shall not hold the suite up.
pytestmark = pytest.mark.timeout(60)

#: Both at once is what `auto` means where there is a GPU.
PLACEMENTS = pytest.mark.parametrize("placement", ["cpu", "gpu", "both"])
EARLY = pytest.mark.parametrize("early", [False, True], ids=["deferred", "in-backward"])


def setup_of(
    placement: str, monkeypatch: pytest.MonkeyPatch, *, early: bool = False, **optimizer: Any
) -> Setup:
    """The model in bf16; `placement` "both": the CPU as host and as device."""
    if placement == "both":
        monkeypatch.setattr(OptimizerConfig, "updates_on_device", lambda config, **_: True)
    settings = {"lr": 1e-2, "clip_norm": None, "check_finite": not early, "weight_decay": 0.5} | optimizer
    config = OptimizerConfig(placement=placement, **settings)  # type: ignore[arg-type]
    return Setup(dtype="bfloat16", optimizer=config)


def updaters() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "updater" in thread.name}


@PLACEMENTS
def test_the_threads_are_those_of_the_placement(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, on_device = {"updater", "updater 2"}, {"device updater"}
    expected = {"cpu": on_cpu, "gpu": on_device, "both": on_cpu | on_device}[placement]
    with rig(setup_of(placement, monkeypatch)):
        assert updaters() == expected
    assert updaters() == set()


def test_where_updates_run() -> None:
    for placement, device_in_host, threads, expected in [
        ("auto", False, 4, True), ("auto", False, 8, False), ("auto", True, 4, False),
        ("both", False, 16, True), ("cpu", False, 2, False),
        ("gpu", False, 16, True), ("gpu", True, 16, True),
    ]:  # fmt: skip
        config = OptimizerConfig(placement=placement)  # type: ignore[arg-type]
        assert config.updates_on_device(device_in_host=device_in_host, threads=threads) is expected


@PLACEMENTS
@EARLY
@pytest.mark.parametrize(
    ("dtype", "master"), [("bfloat16", "split"), ("bfloat16", "fp32"), ("float32", "split")]
)
def test_an_update_is_adamw_of_each_tensor_with_its_own_decay(
    monkeypatch: pytest.MonkeyPatch, placement: str, early: bool, dtype: str, master: str
) -> None:
    """Pages hold tensors of both decay rules; the oracle goes tensor by tensor over whole planes."""
    setup = setup_of(placement, monkeypatch, early=early, master=master).but(dtype=dtype)
    with rig(setup) as run:
        pages = [g for own in run.runtime.updates._granules.own.values() for g in own]
        assert any({call.group for call in granule.calls} == {0, 1} for granule in pages)
        expected = run.planes()
        gradients = keep_gradients(run)
        (outcome,) = run.train(batches(1))
        found = run.planes()
    config = setup.optimizer
    for unit in run.units.in_forward_order:
        planes = {plane: values for (name, plane), values in expected.items() if name == unit.name}
        planes["grad"] = gradients[unit.name]
        for tensor in unit.tensors:
            own = {plane: values[tensor.offset : tensor.end] for plane, values in planes.items()}
            cpu_adamw(
                own,
                {
                    "step": 1, "lr": outcome.verdict.lr, "beta1": config.beta1, "beta2": config.beta2,
                    "eps": config.eps, "weight_decay": [config.weight_decay, 0.0][tensor.group],
                    "grad_scale": 1.0,
                },
                threads=1,
            )  # fmt: skip
    assert same_bits(found, expected) == []


@PLACEMENTS
def test_every_flush_in_backward_finishes_the_update_of_its_step(
    monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """What a checkpoint would hold, step by step: the planes of the deferred update on the CPU."""
    planes = []
    setup = setup_of(placement, monkeypatch, early=True).but(faults_seed=4)
    for each in (setup.but(optimizer=replace(setup.optimizer, check_finite=True, placement="cpu")), setup):
        with rig(each) as run:
            planes.append([(run.train([batch]), run.planes())[1] for batch in batches(3)])
    for deferred, early in zip(*planes, strict=True):
        assert same_bits(deferred, early) == []


@EARLY
def test_bytes_through_the_device_are_those_of_the_planes(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    updates = 3
    with rig(setup_of("gpu", monkeypatch, early=early)) as run:
        run.train(batches(updates))
        run.runtime.flush()
        runtime, layout = run.runtime, run.layout
        streamed = [spec for spec in layout.planes.values() if spec.plane != "activation"]
        up = sum(spec.nbytes for spec in streamed)
        down = sum(spec.nbytes for spec in streamed if spec.durable)
        assert down < up
        assert runtime.updates.device_bytes == (updates * up, updates * down)
        moved = runtime.traffic()
        assert moved.bytes_written["gpu"] == runtime.uploader.bytes_up + updates * up
        assert moved.bytes_read["gpu"] == runtime.downloader.bytes_down + updates * down
    with rig(setup_of("cpu", monkeypatch)) as run:
        run.train(batches(2))
        assert run.runtime.updates.device_bytes == (0, 0)


class Broken(Exception):
    """What a test makes fail."""


def break_update(run: Rig, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`what` works twice and then fails for ever."""
    worker = run.runtime.updates._on_device
    calls = iter(range(2))

    def breaking(function: Any) -> Any:
        def call(*args: Any) -> Any:
            if next(calls, None) is None:
                raise Broken(what)
            return function(*args)

        return call

    if what == "kernel on the cpu":
        monkeypatch.setattr(update, "cpu_adamw", breaking(update.cpu_adamw))
    elif what == "kernel on the device":
        monkeypatch.setattr(run.device.kernels, "adamw", breaking(run.device.kernels.adamw))
    else:
        assert worker is not None
        for lane, _ in worker._slots:
            monkeypatch.setattr(lane, what, breaking(getattr(lane, what)))


@EARLY
@pytest.mark.parametrize("what", ["kernel on the cpu", "kernel on the device", "copy_in", "copy_out"])
def test_an_update_that_fails_fails_the_step_and_keeps_no_lease(
    monkeypatch: pytest.MonkeyPatch, what: str, early: bool
) -> None:
    """The error itself comes out of the step or of the flush behind it, nobody waits, and the run closes."""
    placement = "cpu" if what == "kernel on the cpu" else "gpu"
    with rig(setup_of(placement, monkeypatch, early=early)) as run:
        run.train(batches(1))
        run.runtime.flush()
        break_update(run, what, monkeypatch)
        with pytest.raises(Broken, match=what):
            run.train(batches(3))
        with pytest.raises(Broken, match=what):
            run.runtime.flush()
        run.runtime.close()
        assert updaters() == set()
        for unit in run.units.in_forward_order:
            uses = run.runtime.script.granules.uses(unit.name, idle=False)
            durable = [page for page, intent in uses if intent is Intent.UPDATE]
            with run.store.acquire([(page, Intent.UPDATE) for page in durable[:10]]):
                pass
        for key, spec in run.layout.planes.items():
            if spec.durable:
                run.plane(*key)


@EARLY
@pytest.mark.parametrize("placement", ["cpu", "gpu"])
@pytest.mark.parametrize("then", ["step", "flush"])
def test_an_update_never_waits_for_a_gradient_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, placement: str, early: bool, then: str
) -> None:
    """A gradient that cannot be sent away fails the run, though no worker has seen an error."""
    with rig(setup_of(placement, monkeypatch, early=early)) as run:
        content = run.runtime.downloader._content

        def breaking(page: Page, source: torch.Tensor) -> torch.Tensor:
            if (page.unit, page.plane) == ("embed", "grad"):
                time.sleep(0.2)  # the step has its loss and norm by then
                raise Broken("copy")
            return content(page, source)

        monkeypatch.setattr(run.runtime.downloader, "_content", breaking)
        run.train(batches(1))
        with pytest.raises(Broken):
            run.train(batches(1)) if then == "step" else run.runtime.flush()
