"""`tierstream export`: masters, the directory that the run began with, and the facts on the card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.chat_templates import CHATML, LLAMA3, MARKED, byte_tokenizer
from support.command import Command
from support.exports import Loaded, stored
from support.models import different, rewrite, save_model
from support.runs import make_run

from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.progress import Progress
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.engine.metrics import StepMetrics
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.units import build_layout
from tierstream.engine.weights.state import PlaneWriter
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Store
from tierstream.tools.export import ExportOptions, export

UNUSED = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


class FinishedRun:
    """A run that began with the weights in `source`; its masters have bits that no bf16 has."""

    def __init__(self, root: Path) -> None:
        self.source, self.path = root / "base", root / "run"
        (root / "text").write_text("hello world " * 30)
        train_tokenizer(fingerprint_files([root / "text"]), 259, self.source)
        save_model(self.source)
        rewrite(self.source / "model.safetensors", lambda t: t.update({UNUSED: torch.ones(11)}))
        self.loaded = Loaded(self.source)
        units = find_units(self.loaded.model)
        layout = build_layout(
            units, page_bytes=8192, master="split", grad_dtype="float32", boundary_nbytes=None
        )
        checkpoint = self.path / "checkpoints" / "step-00000002"
        checkpoint.parent.mkdir(parents=True)
        with Store(layout, dram_bytes=8 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0) as store:
            for unit in self.loaded.units:
                PlaneWriter(store, layout)(unit.name, 0, self.loaded.flat.values[unit.name])
            write_snapshot(store, checkpoint, self._state())
        (self.path / "config.yaml").write_text("")
        records = [record(step, loss) for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0))]
        (self.path / "metrics.jsonl").write_text("".join(f"{metrics.to_json()}\n" for metrics in records))

    def _state(self) -> dict[str, Any]:
        architecture = json.loads((self.source / "config.json").read_text())
        settings = {
            "run_dir": str(self.path), "model": {"path": str(self.source)}, "data": {"files": ["text"]},
            "moe": {}, "optimizer": {}, "architecture": architecture,
        }  # fmt: skip
        return {
            "run_id": "r", "step": 2, "applied_updates": 1, "skipped_total": 1, "skipped_in_a_row": 0,
            "settings": settings, "router_biases": {}, "data_fingerprint": "f00d",
        }  # fmt: skip


def record(step: int, loss: float) -> StepMetrics:
    return StepMetrics(
        step=step, optimizer_step=step, loss=loss, grad_norm=1.0, clip_factor=1.0, lr=0.1, skipped=False,
        skipped_total=0, epoch=0.5, samples=1, tokens=1000, trained_tokens=900, step_s=1.0, tokens_per_s=1.0,
    )  # fmt: skip


@pytest.fixture
def finished(tmp_path: Path) -> FinishedRun:
    return FinishedRun(tmp_path)


def test_masters_are_written_in_full(command: Command, finished: FinishedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.run("export", str(finished.path), str(out), "--master")[0] == 0
    tensors = stored(out)
    assert torch.equal(tensors.pop(UNUSED), torch.ones(11))
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert different(tensors, finished.loaded.flat.tensors()) == []
    command.refused(
        "export", str(finished.path), str(tmp_path / "no"), "--master", "--dtype", "bfloat16",
        said=["masters are in float32"],
    )  # fmt: skip


def test_card_has_the_facts_up_to_the_checkpoint(
    command: Command, finished: FinishedRun, tmp_path: Path
) -> None:
    status, said, _ = command.run("export", str(finished.path), str(tmp_path / "out"))
    assert status == 0
    assert "31 tensors, 1 of them as they were, " in said
    text = (tmp_path / "out" / "README.md").read_text()
    for words in ("`base`", "| steps | 2 |", "weights | 1 |", "2,000", "2.5000", "`f00d`"):
        assert words in text


def test_it_is_told_to_its_end(finished: FinishedRun, tmp_path: Path) -> None:
    told: list[Progress] = []
    checkpoint = finished.path / "checkpoints" / "step-00000002"
    export(checkpoint, tmp_path / "out", ExportOptions(), on_progress=told.append)
    nbytes = sum(value.nbytes for value in stored(tmp_path / "out").values())
    assert {(progress.what, progress.total) for progress in told} == {(f"writing {tmp_path / 'out'}", nbytes)}
    assert told[-1].done == nbytes


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(
    command: Command, finished: FinishedRun, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.source)
    rows = finished.loaded.model.config.vocab_size
    tokenizer.add_tokens([f"<{i}>" for i in range(rows + 1 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "larger")
    run, out = str(finished.path), str(tmp_path / "out")
    said = command.run("export", run, out, "--tokenizer", str(tmp_path / "larger"))[1]
    assert f"has {rows + 1} tokens and the model {rows} rows" in said


def test_a_source_that_is_gone_is_missed_and_one_that_moved_is_found(
    command: Command, finished: FinishedRun, tmp_path: Path
) -> None:
    moved = finished.source.rename(tmp_path / "moved")
    run, tokenizer = str(finished.path), ["--tokenizer", str(moved)]
    status, said, _ = command.run("export", run, str(tmp_path / "without"), *tokenizer)
    assert status == 0
    assert f"{finished.source}, which the run began with, is gone" in said
    assert UNUSED not in stored(tmp_path / "without")
    assert command.run("export", run, str(tmp_path / "with"), "--source", str(moved))[0] == 0
    assert UNUSED in stored(tmp_path / "with")
    shutil.rmtree(moved)
    command.refused(
        "export", run, str(tmp_path / "no"), "--source", str(moved), said=[str(moved), "does not exist"]
    )


def test_shards_of_a_size(command: Command, finished: FinishedRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command.run("export", str(finished.path), str(out), "--max-shard", "50KB")[0] == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    command.refused("export", str(finished.path), str(out), "--max-shard", "0B", said=["must be > 0 B"])


@pytest.mark.parametrize("own", [None, LLAMA3, {"default": LLAMA3, "tools": MARKED}])
def test_tokenizer_has_the_template_that_was_trained_with(
    command: Command, tmp_path: Path, own: str | dict[str, str] | None
) -> None:
    """Its file is gone when the model is exported; the other templates of the tokenizer stay. `generate` ends
    an answer as training did.
    """
    config, file = make_run(tmp_path, steps=1), tmp_path / "template.jinja"
    config.data.tokenizer = str(byte_tokenizer(tmp_path / "tokenizer", template=own))
    config.data.chat_template = str(file)
    file.write_text(CHATML)
    assert command.train(config)[0] == 0
    file.unlink()
    assert command.run("export", config.run_dir, str(tmp_path / "out"))[0] == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ends = transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
    assert tokenizer.chat_template == ({**own, "default": CHATML} if isinstance(own, dict) else CHATML)
