"""Settings of experts that cannot be, or would do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.moe.config import MoeConfig
from tierstream.io.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stream": "layers", "idle": "lazy"}, r"moe.idle is lazy and moe.stream is layers"),
        ({"stream": "layers", "gpu_cache": ByteSize(1 << 30)}, r"moe.gpu_cache is .* leave it out"),
        ({"aux_loss_coef": -1.0}, r"moe.aux_loss_coef is -1.0; it must be a finite number >= 0"),
        ({"z_loss_coef": float("nan")}, r"moe.z_loss_coef is nan"),
        ({"bias_update_rate": float("inf")}, r"moe.bias_update_rate is inf"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MoeConfig(**settings)


def test_layers_and_experts() -> None:
    assert MoeConfig().experts_apart
    assert not MoeConfig(stream="layers").experts_apart
