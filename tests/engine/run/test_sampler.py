"""Samples of whole runs: when, what is written, who is told, and what is refused before the first step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, MARKED, SPECIALS, byte_tokenizer
from support.rig import tiny_config
from support.runs import VOCABULARY, final_planes, make_run, records, train

from tierstream.engine.config import RunConfig
from tierstream.engine.metrics import PlanReport, Sample
from tierstream.engine.run.callbacks import Callback
from tierstream.engine.run.sample_config import SampleConfig
from tierstream.engine.run.sampler import Prompts
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import ConfigError
from tierstream.tools.live import ConsoleCallback

PROMPTS = ["the tier", "every page of the small"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def sampled(folder: Path, *, steps: int = 3, **keys: Any) -> RunConfig:
    config = make_run(folder, steps=steps)
    config.sample = SampleConfig(**{"prompts": PROMPTS, "max_tokens": 6, **keys})
    return config


def samples(config: RunConfig) -> list[Sample]:
    lines = (Path(config.run_dir) / "samples.jsonl").read_text().splitlines()
    return [Sample(**json.loads(line)) for line in lines]


def texts(config: RunConfig) -> list[tuple[int, str, str, int]]:
    return [(each.step, each.prompt, each.text, each.tokens) for each in samples(config)]


class Told(Callback):
    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.plan: PlanReport | None = None

    def on_sample(self, sample: Sample) -> None:
        self.samples.append(sample)

    def on_plan(self, plan: PlanReport) -> None:
        self.plan = plan


def test_a_run_writes_samples_and_trains_as_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, told = sampled(tmp_path / "one", every_steps=2), Told()
    with ConsoleCallback() as console:
        Trainer(config, [told, console]).run()
    assert samples(config) == told.samples
    assert [(each.step, each.prompt) for each in told.samples] == [(s, p) for s in (2, 3) for p in PROMPTS]
    assert all(1 <= each.tokens <= 6 and each.seconds > 0 for each in told.samples)
    out = capsys.readouterr().out
    assert f"sample after step 2: 'the tier' -> {told.samples[0].text!r}" in out
    assert "samples of up to 6 tokens: each takes" in out
    assert told.plan is not None
    assert told.plan.sample_bytes_per_token > 0
    plain = make_run(tmp_path / "other", steps=3)
    train(plain)
    assert [each["loss"] for each in records(config)] == [each["loss"] for each in records(plain)]
    for mine, theirs in zip(final_planes(config).values(), final_planes(plain).values(), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_drawn_samples_are_those_of_the_step_in_a_resumed_run_too(tmp_path: Path) -> None:
    config = sampled(tmp_path, every_steps=1, temperature=1.5, top_p=0.9)
    config.checkpoint.every_steps, config.checkpoint.at_end = 2, False
    train(config)
    before = texts(config)
    config.checkpoint.resume = "auto"
    train(config)
    assert texts(config) == before
    assert before[0][2] != before[2][2]


def test_a_prompt_in_the_chat_template_is_another(tmp_path: Path) -> None:
    found = []
    for name, chat in (("plain", None), ("chat", True)):
        config = sampled(tmp_path / name, chat=chat, temperature=0.0, steps=1)
        file = tmp_path / name / "template.jinja"
        file.write_text(TEMPLATE)
        config.data.chat_template = str(file)
        train(config)
        found.append(texts(config))
    assert [prompt for _, prompt, _, _ in found[0]] == [prompt for _, prompt, _, _ in found[1]]
    assert found[0] != found[1]


def test_conversations_have_the_template_by_themselves(tmp_path: Path) -> None:
    config = sampled(tmp_path, steps=1, at_end=True)
    train(config)
    hf_config, directory = tiny_config("qwen3", vocab_size=VOCABULARY), Path(config.run_dir) / "data"

    def ids(chat: bool | None, *formats: str) -> list[list[int]]:
        config.sample.chat = chat
        return Prompts(config, directory, set(formats), hf_config).ids

    plain = ids(None, "auto", "messages")
    config.data.chat_template = str(tmp_path / "template.jinja")
    Path(config.data.chat_template).write_text(TEMPLATE)
    chat = ids(True, "auto", "text")
    assert chat != plain
    assert ids(None, "auto", "text", "messages") == ids(None, "sharegpt") == chat
    assert ids(None, "auto", "text", "prompt") == ids(False, "messages") == plain


def test_a_template_that_fails_is_told(tmp_path: Path) -> None:
    config = sampled(tmp_path, chat=True)
    config.data.tokenizer = str(byte_tokenizer(tmp_path / "tokenizer", template="{{ messages"))
    with pytest.raises(ConfigError, match=r"the chat template is no Jinja template: line 1: unexpected end"):
        Prompts(config, tmp_path, set(), tiny_config("qwen3", vocab_size=512))


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    config, ids = sampled(tmp_path, chat=True), []
    hf_config = tiny_config("qwen3", vocab_size=512)
    for name, template in (("one", CHATML), ("several", {"default": CHATML, "tools": MARKED})):
        config.data.tokenizer = str(byte_tokenizer(tmp_path / name, template=template))
        prompts = Prompts(config, tmp_path, set(), hf_config)
        ids.append((prompts.ids, prompts.end_ids))
    assert ids[0] == ids[1]


def test_an_answer_ends_with_its_turn(tmp_path: Path) -> None:
    """The end of a text, `</s>` here, is another token."""
    config, hf_config = sampled(tmp_path), tiny_config("qwen3", vocab_size=512, eos_token_id=None)
    config.data.tokenizer = str(byte_tokenizer(tmp_path / "tokenizer", eos="</s>", template=CHATML))
    end_of_text, end_of_turn = 256 + SPECIALS.index("</s>"), 256 + SPECIALS.index("<|im_end|>")
    for chat, ends in ((False, {end_of_text}), (True, {end_of_text, end_of_turn})):
        config.sample.chat = chat
        assert Prompts(config, tmp_path, set(), hf_config).end_ids == ends


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"chat": True}, r"sample\.chat is true, but the tokenizer has no chat template"),
        ({"max_tokens": 63}, r"sample\.max_tokens is 63, .* more than the 64 positions of the model"),
    ],
)
def test_what_only_the_tokenizer_and_the_model_know_is_refused_before_the_first_step(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    config = sampled(tmp_path, **keys)
    with pytest.raises(ConfigError, match=said):
        train(config)
    assert not (Path(config.run_dir) / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"prompts": []}, r"sample\.prompts is \[\]"),
        ({"prompts": ["a", ""]}, r"none empty"),
        (
            {"prompts": None, "every_steps": 4},
            r"sample\.every_steps is 4, but there is nothing to go on with",
        ),
        ({"every_steps": 0}, r"sample\.every_steps is 0"),
        ({"at_end": False}, r"no sample would be written"),
        ({"max_tokens": 0}, r"sample\.max_tokens is 0"),
        ({"temperature": -1.0}, r"sample\.temperature is -1\.0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"sample\.top_p is 0\.0"),
        ({"top_p": 0.9}, r"sample\.top_p is 0\.9 and sample\.temperature is 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SampleConfig(prompts=PROMPTS), **keys)
