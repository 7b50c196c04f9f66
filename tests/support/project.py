"""A folder as a user has it before the first run: models, texts, conversations, a drive. All of it tiny."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from support.chat_templates import CHATML, byte_tokenizer
from support.families import moe_config
from support.rig import tiny_config

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig

VOCABULARY = 320

_SUBJECTS = ["the tier", "a page", "every plane", "the drive", "one layer", "the cache"]
_VERBS = ["holds", "moves", "keeps", "reads", "writes", "evicts"]


def sentences(count: int) -> list[str]:
    return [
        f"{_SUBJECTS[i % 6]} {_VERBS[i // 6 % 6]} {_SUBJECTS[(i * 5 + 1) % 6]} for the {i}th time."
        for i in range(count)
    ]


def save_model(directory: Path, *, experts: bool = False) -> None:
    """A model directory as from Hugging Face, whose tokenizer has a chat template."""
    config = (
        moe_config("qwen3_moe", vocab_size=VOCABULARY)
        if experts
        else tiny_config("qwen3", tied=True, vocab_size=VOCABULARY)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    byte_tokenizer(directory, template=CHATML)


def make_data(folder: Path) -> None:
    """corpus/*.txt, general.jsonl, chat.jsonl, prompts.jsonl, table.csv, held-out.jsonl"""
    texts = sentences(60)
    (folder / "corpus").mkdir()
    for number in range(3):
        (folder / "corpus" / f"{number}.txt").write_text("\n".join(texts[number * 20 : number * 20 + 20]))
    chats = [
        [{"role": "user", "content": f"What does {i} say?"}, {"role": "assistant", "content": text}]
        for i, text in enumerate(texts)
    ]
    records = {
        "general": [{"text": text} for text in texts[:20]],
        "chat": [{"messages": messages} for messages in chats[:40]],
        "held-out": [{"messages": messages} for messages in chats[40:]],
        "prompts": [{"prompt": text[:10], "completion": text[10:]} for text in texts],
    }
    for name, values in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    (folder / "table.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts))


def shrink(config: RunConfig, profile: Path) -> RunConfig:
    """The same run at a size for tests: on the CPU, few steps of short rows, no drive measured."""
    config.data.seq_len = min(config.data.seq_len, 64)
    steps = config.train.steps
    config.train.steps, config.train.epochs = 2 if steps is None or steps > 4 else steps, None
    config.train.rows_per_step, config.train.device, config.train.kernels = 4, "cpu", "plain"
    config.train.rows_per_chunk = None if config.train.rows_per_chunk is None else 2
    config.optimizer.placement = "auto"
    config.sample.max_tokens = min(config.sample.max_tokens, 4)
    if config.eval.share is not None:
        config.eval.share = max(config.eval.share, 0.1)
    config.tiers.profile, config.tiers.page = str(profile), ByteSize(8192)
    config.tiers.dram = None if config.tiers.dram is None else ByteSize("4 MiB")
    config.tiers.gpu = None
    if config.model.vocab_size is not None:
        config.model.vocab_size = min(config.model.vocab_size, 2 * VOCABULARY)
    return config
