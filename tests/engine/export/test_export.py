"""What is exported loads in plain transformers, equal to the bit, with all that a model directory needs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.children import in_a_child, with_few_files
from support.exports import Loaded, export_one_by_one, export_zeros, pretrained, stored
from support.families import save_family
from support.models import DENSE, SIZES, different, save_model, two_units

from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.engine.export.export import export_model, snapshot_reader
from tierstream.engine.export.plan import plan_export
from tierstream.engine.model.carve import find_units
from tierstream.engine.model.config import ModelConfig
from tierstream.engine.model.frozen import freeze
from tierstream.engine.model.meta_model import build_meta_model, is_kept_in_fp32
from tierstream.engine.model.units import build_layout
from tierstream.engine.weights.state import PlaneWriter
from tierstream.io import seam
from tierstream.io.errors import ConfigError, DataError, InvariantError, StorageError
from tierstream.tiered.snapshot import Snapshot
from tierstream.tiered.snapshot_writer import write_snapshot
from tierstream.tiered.store import Store


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_export_loads_equal_and_has_the_names_of_save_pretrained(
    tmp_path: Path, family: str, tied: bool
) -> None:
    save_model(tmp_path / "source", family=family, tie_word_embeddings=tied)
    loaded = Loaded(tmp_path / "source")
    info = loaded.export(tmp_path / "out", max_shard_bytes=40_000, buffer_bytes=1000)
    assert loaded.largest <= 1000 // 8
    back = pretrained(tmp_path / "out")
    assert {value.dtype for value in back.values()} == {torch.bfloat16}
    assert different(back, loaded.tensors(torch.bfloat16)) == []
    ours, theirs = stored(tmp_path / "out"), stored(tmp_path / "source")
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    assert info.shards == len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert info.nbytes == sum(value.nbytes for value in ours.values())
    assert info.tensors == len(ours)


def test_unchanged_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    """Source -> planes -> export -> planes: a fixed point."""
    save_model(tmp_path / "source", shard="60KB")
    Loaded(tmp_path / "source", low_bits=False).export(tmp_path / "out")
    assert different(stored(tmp_path / "out"), stored(tmp_path / "source")) == []
    first, second = (Loaded(tmp_path / name, low_bits=False).flat.tensors() for name in ("source", "out"))
    assert different(first, second) == []


@pytest.mark.parametrize("run_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_type_of_the_export(tmp_path: Path, run_dtype: str, dtype: str | None) -> None:
    save_model(tmp_path / "source", dtype=torch.float32)
    loaded = Loaded(tmp_path / "source", run_dtype)
    loaded.export(tmp_path / "out", dtype=dtype, buffer_bytes=3000)
    expected = getattr(torch, dtype or run_dtype)
    back = pretrained(tmp_path / "out")
    assert {value.dtype for value in back.values()} == {expected}
    assert different(back, loaded.tensors(expected)) == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == (dtype or run_dtype)


def test_parameters_and_buffers_that_a_family_keeps_in_fp32_stay_so(tmp_path: Path) -> None:
    """Router and correction bias of a bf16 export of an fp32 run (C79)."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 2, "head_dim": 8}, moe_intermediate_size=12, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    source.get_buffer(bias).copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    source.save_pretrained(tmp_path / "source")
    loaded = Loaded(tmp_path / "source", "float32")
    loaded.export(tmp_path / "out", dtype="bfloat16")
    tensors = stored(tmp_path / "out")
    in_fp32 = {key for key, value in tensors.items() if value.dtype == torch.float32}
    assert in_fp32 == {key for key in tensors if is_kept_in_fp32(loaded.model, key, torch.bfloat16)}
    assert bias in in_fp32
    assert torch.equal(tensors[bias], source.get_buffer(bias))
    router = "model.layers.2.mlp.gate.weight"  # in fp32 or not, by the version of transformers
    assert torch.equal(tensors[router], loaded.tensors(torch.bfloat16)[router])


def test_tied_head_is_not_written_and_untied_equal_ones_both_are(tmp_path: Path) -> None:
    """C67."""
    for tied in (True, False):
        save_model(tmp_path / f"source-{tied}", tie_word_embeddings=tied)
        loaded = Loaded(tmp_path / f"source-{tied}")
        if not tied:
            first, second = (
                loaded.flat.tensors()[n] for n in ("model.embed_tokens.weight", "lm_head.weight")
            )
            second.copy_(first)
        loaded.export(tmp_path / f"out-{tied}")
        assert ("lm_head.weight" in stored(tmp_path / f"out-{tied}")) is not tied


def test_export_takes_only_its_buffers(tmp_path: Path) -> None:
    """13 MB within 512 KiB."""
    save_model(tmp_path / "source", vocab_size=40_000, intermediate_size=2000)
    model, _ = build_meta_model(ModelConfig(path=str(tmp_path / "source")))
    units = two_units(model)
    info, peak = export_zeros(model, units, tmp_path / "out")
    assert info.nbytes > 8 << 20
    assert peak < 512 << 10


# What belongs to a model directory (C71)


@pytest.fixture(scope="module")
def with_everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source directory with tokenizer, templates, generation settings, and a file that belongs to none."""
    root = tmp_path_factory.mktemp("source")
    (root / "text").write_text("hello world " * 30)
    path = train_tokenizer(fingerprint_files([root / "text"]), 259, root / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = {
        "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "tools": "{{ tools }}",
    }
    tokenizer.save_pretrained(path)
    save_model(path)
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.95, "eos_token_id": [0, 1], "do_sample": True})
    )
    (path / "training_args.bin").write_bytes(b"\0" * 100)
    return path


CLEAN_PROCESS = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
messages = [{"role": "user", "content": "hello world"}]
text = tokenizer.apply_chat_template(messages, tokenize=False)
ids = tokenizer(text, return_tensors="pt").input_ids
made = model.generate(ids, max_new_tokens=5, min_new_tokens=5)
print(json.dumps({
    "text": text, "new": made.shape[1] - ids.shape[1], "templates": tokenizer.chat_template,
    "generation": [model.generation_config.temperature, model.generation_config.top_p,
                   model.generation_config.eos_token_id],
    "sums": {name: p.double().sum().item() for name, p in model.named_parameters()},
}))
"""


def test_moved_directory_works_offline_in_a_clean_process(tmp_path: Path, with_everything: Path) -> None:
    loaded = Loaded(with_everything)
    loaded.export(tmp_path / "a b'c$HOME:é", tokenizer_dir=with_everything, source=loaded.plan)
    moved = (tmp_path / "a b'c$HOME:é").rename(tmp_path / "moved 'é")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "no-cache")}
    done = subprocess.run(
        [sys.executable, "-c", CLEAN_PROCESS, str(moved)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen["text"] == "<user>hello world"
    assert seen["new"] == 5
    assert seen["templates"] == transformers.AutoTokenizer.from_pretrained(with_everything).chat_template
    assert seen["generation"] == [0.6, 0.95, [0, 1]]
    assert seen["sums"] == {
        name: value.double().sum().item() for name, value in loaded.tensors(torch.bfloat16).items()
    }
    assert (moved / "generation_config.json").read_bytes() == (
        with_everything / "generation_config.json"
    ).read_bytes()
    assert not (moved / "training_args.bin").exists()
    assert (moved / "tokenizer.json").read_bytes() == (with_everything / "tokenizer.json").read_bytes()


def test_new_model_ends_a_text_with_the_tokenizer_of_its_run(tmp_path: Path, with_everything: Path) -> None:
    """The architecture's config names ids of another tokenizer (bos 1, eos 2)."""
    loaded = Loaded(with_everything)
    loaded.export(tmp_path / "out", tokenizer_dir=with_everything, new_ids=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for settings in (model.config, model.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (None, 0, 1)
    loaded.export(tmp_path / "without")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "without").eos_token_id == 2
    assert loaded.model.config.eos_token_id == 2  # the run's own is left alone


# Refusals and faults


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    save_model(tmp_path / "source", num_hidden_layers=1)
    return Loaded(tmp_path / "source")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("gone")])
def test_existing_target_is_refused_and_left_alone(
    tmp_path: Path, loaded: Loaded, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "out")
    with pytest.raises(ConfigError, match="out exists; name a new one"):
        loaded.export(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_too_little_space_is_known_before_anything_is_read(tmp_path: Path, loaded: Loaded) -> None:
    class Small(seam.Syscalls):
        def statvfs(self, path: str) -> os.statvfs_result:
            found = list(super().statvfs(path))
            found[:5] = [4096, 4096, 10, 10, 10]  # f_bsize, f_frsize, f_blocks, f_bfree, f_bavail
            return os.statvfs_result(found)

    with (
        seam.injected(Small()),
        pytest.raises(StorageError, match=r"bytes\) are needed .*40960 bytes\) are free"),
    ):
        loaded.export(tmp_path / "out")
    assert loaded.largest == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
def test_failed_export_leaves_nothing_behind(tmp_path: Path, loaded: Loaded, call: str) -> None:
    """The drive fails once the weights are being written."""
    calls, read = seam.Syscalls(), loaded.read

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "")

    def read_and_break(unit: str, start: int, out: np.ndarray) -> None:
        setattr(calls, call, fail)
        read(unit, start, out)

    with seam.injected(calls), pytest.raises(StorageError, match=r"/out\.tmp.* failed"):
        export_model(read_and_break, loaded.model, loaded.units, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "out.tmp", ignore_errors=True)  # with rename gone, removal fails as well
    loaded.export(tmp_path / "out")


def test_leftover_of_a_killed_export_is_no_obstacle(tmp_path: Path, loaded: Loaded) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model.safetensors").write_text("half")
    loaded.export(tmp_path / "out")
    assert different(pretrained(tmp_path / "out"), loaded.tensors(torch.bfloat16)) == []


def test_missing_tokenizer_is_refused(tmp_path: Path, loaded: Loaded) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        loaded.export(tmp_path / "out", tokenizer_dir=tmp_path / "source")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_units_that_are_not_the_models_are_a_bug(tmp_path: Path, loaded: Loaded) -> None:
    with pytest.raises(InvariantError, match="units and model differ"):
        plan_export(loaded.model, loaded.units[:1], None)
    save_family(tmp_path / "mixture", "mixtral")
    mixture = Loaded(tmp_path / "mixture")
    without = [unit for unit in mixture.units if unit.name != "layers.1.experts.2"]
    with pytest.raises(InvariantError, match=r"differ in model\.layers\.1\.mlp\.experts\.down_proj, "):
        plan_export(mixture.model, without, None)


def test_two_hundred_shards_with_64_file_handles(tmp_path: Path) -> None:
    """C87."""
    save_model(
        tmp_path / "source", shard="0KB", num_hidden_layers=23, hidden_size=8, head_dim=4, intermediate_size=5
    )
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 200
    in_a_child(with_few_files, 64, export_one_by_one, tmp_path / "source", tmp_path / "out")
    assert different(stored(tmp_path / "out"), Loaded(tmp_path / "source").tensors(torch.bfloat16)) == []


@pytest.mark.parametrize("frozen", [None, ["*.layers.1.*", "*norm*"]])
@pytest.mark.parametrize(
    ("dtype", "master"), [("bfloat16", "split"), ("bfloat16", "fp32"), ("float32", "split")]
)
def test_snapshot_gives_weights_and_masters(
    tmp_path: Path, dtype: str, master: str, frozen: list[str] | None
) -> None:
    """From a checkpoint of a run: in fp32 the masters, in bf16 the weights that the run computes with. What
    is frozen has no master: its weights are both."""
    save_model(tmp_path / "source", dtype=torch.float32)
    loaded = Loaded(tmp_path / "source", dtype)
    masters = loaded.flat.tensors()
    tie = masters["lm_head.weight"].view(torch.int32)
    tie[0, 0] = 0x3F808000  # between 1 and the next bf16: split masters round away from zero, others to even
    freeze(loaded.model, ModelConfig(path="-", freeze=frozen))
    for name, parameter in loaded.model.named_parameters():
        if not parameter.requires_grad:
            masters[name].copy_(masters[name].to(getattr(torch, dtype)))
    units = find_units(loaded.model)
    layout = build_layout(units, page_bytes=8192, master=master, grad_dtype="float32", boundary_nbytes=None)
    store = Store(layout, dram_bytes=8 << 20, directory=None, prefetch_bytes=0, writeback_bytes=0)
    write = PlaneWriter(store, layout)
    for unit in units.in_forward_order:
        for spec in unit.tensors:
            write(unit.name, spec.offset, masters[spec.name].numpy())
    write_snapshot(store, tmp_path / "snapshot", {})
    store.close()
    read = snapshot_reader(Snapshot.open(tmp_path / "snapshot"))
    weights = {name: value.bfloat16() for name, value in masters.items()}
    if (dtype, master) == ("bfloat16", "split"):
        rounded = {name: (value.view(torch.int32) + 0x8000) & ~0xFFFF for name, value in masters.items()}
        weights = {name: value.view(torch.float32) for name, value in rounded.items()}
        assert weights["lm_head.weight"][0, 0] > 1
    in_order = units.in_forward_order
    assert any(not unit.trained for unit in in_order) == bool(frozen)
    export_model(read, loaded.model, in_order, tmp_path / "fp32", dtype="float32", buffer_bytes=5000)
    export_model(read, loaded.model, in_order, tmp_path / "bf16", dtype="bfloat16", buffer_bytes=5000)
    assert different(pretrained(tmp_path / "fp32"), masters) == []
    assert different(pretrained(tmp_path / "bf16"), weights) == []
