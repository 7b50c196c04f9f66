"""What `tierstream plan` prints. At most 80 columns wide, but for the verdict."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from tierstream.engine.planner.outlook import Outlook
from tierstream.io.sizes import format_bytes
from tierstream.tools.tables import count, table

#: Causes and resources that take less of a step are left out.
_TOLD_SHARE = 0.005


def print_outlook(console: Console, outlook: Outlook) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    say(f"Fits on {outlook.machine}: {_room(outlook)}")
    say(f"{count(outlook.parameters)} parameters, {outlook.tokens_per_step:,} tokens per step")
    console.print(_memory(outlook))
    if local := " and ".join(f"{format_bytes(size)} of {name}" for name, size in outlook.step_local.items()):
        say(f"each step makes {local}, and uses them up")
    say(_peaks(outlook))
    say(_disk(outlook))
    rows = [
        (link, f"{nbytes / 1e9:,.1f}", f"{nbytes / outlook.step_s / 1e9:.2f}")
        for link, nbytes in outlook.traffic.items()
        if nbytes
    ]
    console.print(table("Traffic of a step", ("link", "GB", "GB/s"), rows))
    _print_speed(console, outlook)
    rows = [(help.change, f"{help.step_s:.4g}", f"{100 * help.gain:+.1f} %") for help in outlook.helps]
    if rows:
        console.print(table("What would help", ("change", "s a step", "tokens/s"), rows))
    say(_price(outlook))


def _room(outlook: Outlook) -> str:
    host = format_bytes(outlook.host_bytes - _host_taken(outlook))
    said = f"{host} of host memory are left, for the process itself as well"
    if outlook.device_bytes is None:
        return said
    return f"about {format_bytes(outlook.device_bytes - outlook.device.nbytes)} of the GPU and {said}"


def _memory(outlook: Outlook) -> object:
    rows = [
        (tier, kind, format_bytes(nbytes))
        for tier, kinds in outlook.planes.items()
        for kind, nbytes in kinds.items()
    ]
    return table("What is where", ("tier", "plane", "bytes"), rows, text_columns=2)


def _host_taken(outlook: Outlook) -> int:
    """At the peak, where the device is the CPU; else what the tiers have."""
    beside_bytes = outlook.device.beside_bytes if outlook.device_bytes is None else 0
    return outlook.dram_bytes + beside_bytes


def _peaks(outlook: Outlook) -> str:
    peak = outlook.device
    host = f"host arenas {format_bytes(outlook.dram_bytes)} of {format_bytes(outlook.host_bytes)}"
    if outlook.device_bytes is None:
        return f"{host}\nhost peak about {format_bytes(_host_taken(outlook))}: {peak.describe()}"
    gpu = f"{format_bytes(peak.nbytes)} of {format_bytes(outlook.device_bytes)}"
    return f"{host}\nGPU peak about {gpu}: {peak.describe()}"


def _disk(outlook: Outlook) -> str:
    disk = outlook.disk
    drives = f"{format_bytes(disk['store'])} for the state, " if disk["store"] else ""
    kept = f"{format_bytes(disk['checkpoints'])} for checkpoints of {format_bytes(disk['checkpoint'])} each"
    return f"disk: {drives}{kept}"


def _print_speed(console: Console, outlook: Outlook) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    bound = max(outlook.bound_s, key=outlook.bound_s.__getitem__)
    say(
        f"A step takes about {outlook.step_s:.4g} s: {count(outlook.tokens_per_s)} tokens/s, "
        f"{outlook.tflop_per_s_6pt:.3g} TFLOP/s (6PT), {outlook.tflop_per_s_8pt:.3g} (8PT)"
    )
    say(f"  no step is faster than {outlook.bound_s[bound]:.4g} s, set by {bound}")
    say(f"  busy: {_shares(outlook.busy_s, outlook.step_s)}")
    say(f"  the device waits for: {_shares(outlook.idle_s, outlook.step_s)}")
    if outlook.grain > 1:
        say(f"  simulated in pages of {format_bytes(outlook.grain * outlook.page_bytes)}")


def _shares(seconds: Mapping[str, float], whole_s: float) -> str:
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    told = [f"{name} {s / whole_s:.1%}" for name, s in longest if s / whole_s >= _TOLD_SHARE]
    return ", ".join(told) or "nothing"


def _price(outlook: Outlook) -> str:
    text = f"a billion tokens take {_duration(outlook.days_per_billion_tokens)}"
    if outlook.cost_per_billion_tokens is not None:
        text += f" and cost {outlook.cost_per_billion_tokens:,.2f}"
    if outlook.steps is not None and outlook.days is not None:
        text += f"; the {outlook.steps:,} steps of this run take {_duration(outlook.days)}"
    return text


def _duration(days: float) -> str:
    for unit, share in (("years", 365.25), ("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= share:
            return f"{count(days / share)} {unit}"
    return f"{86400 * days:.3g} seconds"
