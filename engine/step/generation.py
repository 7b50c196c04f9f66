"""Texts that the model goes on with, while its layers are streamed: a pass forward for each token, for all
prompts at once, so weights come once for a token of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from tierstream.engine.step.runtime import Runtime

#: Logits, fp32 [rows, vocabulary] -> the next token of each row, int64 [rows].
Choose = Callable[[torch.Tensor], torch.Tensor]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@dataclass
class Draw:
    """Draws tokens, on the CPU: the same ones on every tier.

    Attributes:
        top_p: nucleus sampling (arXiv 1904.09751): the likeliest tokens that have this much probability.
    """

    temperature: float
    top_p: float
    generator: torch.Generator

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(logits.cpu() / self.temperature, -1)
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        drawn = torch.multinomial(ordered * (before < self.top_p), 1, generator=self.generator)
        return ids.gather(-1, drawn).squeeze(-1)


def generate(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end_ids: Collection[int],
    choose: Choose = greedy,
) -> list[list[int]]:
    """What follows each prompt: at most `max_tokens` ids, the last one of `end_ids` if the model ends it.

    Shorter prompts are padded on the left, under a mask. Keys and values lie on the device, in a cache of
    transformers.
    """
    device = runtime.device.torch_device
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found: list[list[int]] = [[] for _ in prompts]
    with runtime.forward_only():
        cache = runtime.new_cache()
        for _ in range(max_tokens):
            logits = runtime.next_logits(
                cache, input_ids=ids.to(device), attention_mask=mask.to(device),
                position_ids=positions.to(device),
            )  # fmt: skip
            chosen = choose(logits).cpu()
            for row, token in zip(found, chosen.tolist(), strict=True):
                if not row or row[-1] not in end_ids:
                    row.append(token)
            if all(row[-1] in end_ids for row in found):
                break
            ids = chosen.unsqueeze(-1)
            mask = torch.cat([mask, torch.ones_like(ids)], -1)
            positions = positions[:, -1:] + 1
    return found
