"""How an update is cut into granules: every element of every plane exactly once, under leases of a few
pages.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from support.rig import tiny_config

from tierstream.engine.model.carve import find_units
from tierstream.engine.model.units import build_layout
from tierstream.engine.update.granules import granules
from tierstream.tiered.layout import ITEM_BYTES
from tierstream.tiered.store import Intent


@pytest.mark.parametrize("page_bytes", [4096, 12288, 65536])
@pytest.mark.parametrize(
    ("dtype", "master", "grad"),
    [
        (torch.bfloat16, "split", "float32"),
        (torch.bfloat16, "split", "bfloat16"),
        (torch.bfloat16, "fp32", "float32"),
        (torch.float32, "split", "float32"),
        (torch.float32, "split", "bfloat16"),
    ],
)
def test_granules_cover_every_element_of_every_plane_once(
    page_bytes: int, dtype: torch.dtype, master: str, grad: str
) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen2"), dtype=dtype)
    units = find_units(model)
    layout = build_layout(units, page_bytes=page_bytes, master=master, grad_dtype=grad, boundary_nbytes=4096)
    for unit in units.in_forward_order:
        planes = [plane for name, plane in layout.planes if name == unit.name]
        seen = {plane: [0] * unit.numel for plane in planes}
        used = []
        groups = [-1] * unit.numel
        for start, end, group in unit.group_runs():
            groups[start:end] = [group] * (end - start)
        for granule in granules(layout, unit):
            used += [page for page, _ in granule.uses]
            assert len(granule.uses) <= 9
            for page, intent in granule.uses:
                assert intent is (Intent.CONSUME if page.plane == "grad" else Intent.UPDATE)
            for call in granule.calls:
                spans = set()
                for plane, (index, first, last) in call.pieces.items():
                    page = granule.uses[index][0]
                    item = ITEM_BYTES[layout.spec(unit.name, plane).dtype]
                    assert page.plane == plane
                    assert 0 <= first < last <= layout.page_nbytes(page)
                    begin = page.index * (page_bytes // item) + first // item
                    spans.add((begin, begin + (last - first) // item))
                    for element in range(begin, begin + (last - first) // item):
                        seen[plane][element] += 1
                        assert groups[element] == call.group
                assert len(spans) == 1
        assert all(count == 1 for plane in planes for count in seen[plane])
        assert len(used) == len(set(used)) == sum(layout.page_count(unit.name, plane) for plane in planes)
