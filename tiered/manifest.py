"""`manifest.json` of a snapshot: what must be in the directory, to the byte. Written last.

{"crc32c": <of the compact JSON text of "manifest", keys sorted>,
 "manifest": {"format": "tierstream snapshot", "version": 3, "page_bytes": ...,
              "planes": [{"unit": ..., "plane": ..., "dtype": ..., "numel": ..., "tensors": [...],
                          "crc32c": [per page; null: never written, all zeros, no file]}, ...],
              "state": {...}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tierstream._native import crc32c
from tierstream.io.errors import CheckpointError, InvariantError
from tierstream.tiered.layout import ITEM_BYTES, Layout, Page, PlaneSpec, TensorSpec

_FORMAT = "tierstream snapshot"
_VERSION = 3

#: Per page its CRC-32C, or None for a page of zeros that has no file.
Checksums = Mapping[Page, int | None]


@dataclass(frozen=True)
class Manifest:
    layout: Layout
    checksums: Checksums
    state: dict[str, Any]


def plain_json(state: Mapping[str, object]) -> dict[str, Any]:
    """The state as it will be read back.

    Raises:
        InvariantError: it holds what JSON cannot say.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise InvariantError(f"the state of a snapshot must be JSON: {error}") from error
    return plain


def encode(manifest: Manifest) -> bytes:
    layout = manifest.layout
    planes = [
        {
            "unit": spec.unit,
            "plane": spec.plane,
            "dtype": spec.dtype,
            "numel": spec.numel,
            "tensors": [_tensor_json(tensor) for tensor in spec.tensors],
            "crc32c": [manifest.checksums[page] for page in layout.pages(spec.unit, spec.plane)],
        }
        for spec in layout.planes.values()
    ]
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "page_bytes": layout.page_bytes,
        "planes": planes,
        "state": manifest.state,
    }
    return json.dumps({"crc32c": json_checksum(body), "manifest": body}, indent=1).encode()


def decode(data: bytes, path: str) -> Manifest:
    """Read the bytes of the file `path`.

    Raises:
        CheckpointError: damaged, or of another format or version.
    """
    try:
        outer = json.loads(data)
        body, stated = outer["manifest"], outer["crc32c"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"not a manifest: {error}") from error
    if stated != (actual := json_checksum(body)):
        raise _damaged(path, f"its CRC-32C is {actual}, it should be {stated}")
    if body["format"] != _FORMAT or body["version"] != _VERSION:
        raise CheckpointError(
            f"{path} is of format {body['format']!r} version {body['version']}; this program reads "
            f"{_FORMAT!r} version {_VERSION}: use the program that wrote it"
        )
    planes: dict[tuple[str, str], PlaneSpec] = {}
    checksums: dict[Page, int | None] = {}
    for item in body["planes"]:
        spec = PlaneSpec(
            item["unit"],
            item["plane"],
            item["dtype"],
            item["numel"],
            durable=True,
            tensors=tuple(
                TensorSpec(**tensor | {"shape": tuple(tensor["shape"])}) for tensor in item["tensors"]
            ),
        )
        planes[spec.unit, spec.plane] = spec
        for index, checksum in enumerate(item["crc32c"]):
            checksums[Page(spec.unit, spec.plane, index)] = checksum
    layout = Layout(body["page_bytes"], planes)
    for spec in planes.values():
        if spec.dtype not in ITEM_BYTES or any(
            page not in checksums for page in layout.pages(spec.unit, spec.plane)
        ):
            raise _damaged(path, f"its entry of plane {spec.unit}/{spec.plane} is wrong")
    return Manifest(layout, checksums, body["state"])


def _tensor_json(tensor: TensorSpec) -> dict[str, Any]:
    return asdict(tensor) | {"shape": list(tensor.shape)}


def json_checksum(body: Mapping[str, Any]) -> int:
    """CRC-32C of a JSON value, however it is written down."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return crc32c(text)


def _damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}; use another checkpoint")
