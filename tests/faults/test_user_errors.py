"""What users get wrong: one clear message and status 2, in the first seconds; nothing half-made that a later
run takes for whole, no lock left behind, and the mended run works in the same directories.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.command import Command, nothing_is_half_made, nothing_is_locked, use_drive
from support.faults import FaultySyscalls, fail
from support.rig import reference_model, tiny_config
from support.runs import VOCABULARY, make_run, records, with_tokenizer

from tierstream.engine.assemble import STATE_FOLDER
from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.data.files import fingerprint_files
from tierstream.engine.data.tokenizer import train_tokenizer
from tierstream.engine.model.config import ModelConfig
from tierstream.io import seam
from tierstream.tools import cli

#: Spoils a run, yields what the message must name, and mends the run when it goes on.
Mistake = Callable[[RunConfig, Path], Iterator[list[str]]]
MISTAKES: list[Mistake] = []


def mistake(function: Mistake) -> Mistake:
    MISTAKES.append(function)
    return function


@contextmanager
def mounted(point: Path, *command: str) -> Iterator[None]:
    """A mount for as long as the block runs; skips where that is not permitted."""
    if subprocess.run(["mount", *command, str(point)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)


@contextmanager
def held_by_another_process(directory: Path) -> Iterator[int]:
    """The directory's lock is held; gives the process's id."""
    code = (
        "import sys; from tierstream.io.drives import DirectoryLock\n"
        "with DirectoryLock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.communicate("")


def use_weights(config: RunConfig, folder: Path, **options: Any) -> list[Path]:
    """Start the run from a model directory; its safetensors files."""
    directory = with_tokenizer(config, folder / "weights")
    model = reference_model(tiny_config("qwen3", tied=True, vocab_size=VOCABULARY), torch.bfloat16)
    model.save_pretrained(directory, **options)
    config.model = ModelConfig(path=str(directory))
    return sorted(directory.glob("*.safetensors"))


@mistake
def shard_is_missing(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    shards = use_weights(config, folder, max_shard_size="40KB")
    aside = shards[1].rename(folder / "aside")
    yield [f"1 of the {len(shards)} shards", "model.safetensors.index.json", shards[1].name, "download"]
    aside.rename(shards[1])


@mistake
def weights_are_cut_off(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    (file,) = use_weights(config, folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    yield [str(file), "is cut off", f"{len(whole) - 100} bytes", str(len(whole)), "download it again"]
    file.write_bytes(whole)


@mistake
def weights_are_nan(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    (file,) = use_weights(config, folder)
    use_drive(config, folder / "drive")
    tensors = transformers.AutoModelForCausalLM.from_pretrained(file.parent).state_dict()
    from safetensors.torch import save_file

    whole = file.read_bytes()
    spoiled = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    spoiled.view(-1)[[5, 100]] = torch.tensor([torch.nan, torch.inf], dtype=spoiled.dtype)
    kept = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    save_file({**kept, "model.layers.1.mlp.up_proj.weight": spoiled}, file)
    yield ["2 values of tensor model.layers.1.mlp.up_proj.weight", str(file), "NaN or infinite", "damaged"]
    file.write_bytes(whole)


@mistake
def model_has_no_config(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    (file,) = use_weights(config, folder)
    aside = (file.parent / "config.json").rename(folder / "aside")
    yield [str(file.parent / "config.json"), "does not exist", "model.path must be a local directory"]
    aside.rename(file.parent / "config.json")


@mistake
def model_is_an_encoder(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    right = config.model
    transformers.BertConfig(num_hidden_layers=1).save_pretrained(folder / "bert")
    config.model = ModelConfig(config=str(folder / "bert"))
    yield [str(folder / "bert" / "config.json"), "BertConfig is not a causal decoder"]
    config.model = right


@mistake
def model_is_an_encoder_decoder(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    right = config.model
    transformers.T5Config(num_layers=1).save_pretrained(folder / "t5")
    config.model = ModelConfig(config=str(folder / "t5"))
    yield [str(folder / "t5" / "config.json"), "T5Config is not a causal decoder"]
    config.model = right


@mistake
def tokenizer_is_missing(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    config.data.tokenizer = str(folder / "no-such-tokenizer")
    yield [f"tokenizer directory {folder}/no-such-tokenizer does not exist", "hub"]
    config.data.tokenizer = None


@mistake
def tokenizer_is_larger_than_the_embedding(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    """C49: the token, its id and its line, before the first step."""
    text = Path(config.data.files[0])
    train_tokenizer(fingerprint_files([text]), VOCABULARY, folder / "larger")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "larger")
    tokenizer.add_tokens([f"<extra-{i}>" for i in range(VOCABULARY + 1 - len(tokenizer))])
    last = VOCABULARY
    assert len(tokenizer) == last + 1
    tokenizer.save_pretrained(folder / "larger")
    lines = text.read_text().splitlines()
    token = tokenizer.convert_ids_to_tokens(last)
    text.write_text("\n".join([*lines[:49], f"the {token} tier"]))
    config.data.tokenizer = str(folder / "larger")
    yield [
        f"token {token!r} has the id {VOCABULARY}",
        f"{text}:50",
        f"only {VOCABULARY} rows",
        "data.tokenizer",
    ]
    text.write_text("\n".join(lines))


@mistake
def chat_template_is_missing(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    config.data.chat_template = str(folder / "none.jinja")
    yield ["data.chat_template: ", "none.jinja", "name a file with a Jinja template, or leave it out"]
    config.data.chat_template = None


@mistake
def no_file_matches(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    right, config.data.files = config.data.files, [f"{folder}/*.absent"]
    yield ["data.files", f"{folder}/*.absent", "matches no file"]
    config.data.files = right


@mistake
def files_are_empty(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    texts = {Path(file): Path(file).read_text() for file in config.data.files}
    for file in texts:
        file.write_text("")
    yield ["the 2 files of data.files hold no text", "name others"]
    for file, text in texts.items():
        file.write_text(text)


@mistake
def a_file_is_no_text(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    file = Path(config.data.files[1])
    text = file.read_bytes()
    file.write_bytes(text[:70] + b"\xff" + text[70:])
    yield [f"{file} is no UTF-8 text", "0xff", "offset 70", "iconv"]
    file.write_bytes(text)


@mistake
def dram_is_too_small_beside_a_drive(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    use_drive(config, folder / "drive")
    right, config.tiers.dram = config.tiers.dram, ByteSize(20 * 8192)
    yield ["tiers.dram is 160.00 KiB", "20 pages of 8.00 KiB", "at least 24", "raise tiers.dram to 192"]
    config.tiers.dram = right


@mistake
def dram_is_too_small_without_a_drive(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    config.tiers.dram = ByteSize(256 << 10)
    yield ["the state needs ", "tiers.dram holds 256.00 KiB", "tiers.nvme_dirs", "raise tiers.dram"]
    config.tiers.dram = None


@mistake
def gpu_is_too_small(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    config.tiers.gpu = ByteSize(32 << 10)
    yield ["tiers.gpu is 32.00 KiB", "two layers of ", "raise tiers.gpu"]
    config.tiers.gpu = None


@mistake
def drive_is_missing(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    drive = use_drive(config, folder / "drive")
    drive.rmdir()
    yield ["tiers.nvme_dirs: ", str(drive), "No such file or directory", "create it or name another"]
    drive.mkdir()


@mistake
def drive_is_a_file(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    drive = use_drive(config, folder / "drive")
    drive.rmdir()
    drive.write_text("not a directory")
    yield [str(drive), "Not a directory", "name a directory, not a file"]
    assert drive.read_text() == "not a directory"
    drive.unlink()
    drive.mkdir()


@mistake
def drive_is_below_a_file(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    use_drive(config, folder / "drive")
    right, config.tiers.nvme_dirs = config.tiers.nvme_dirs, [f"{config.data.files[0]}/drive"]
    yield [f"{config.data.files[0]}/drive", "Not a directory"]
    config.tiers.nvme_dirs = right


@mistake
def drive_is_a_circle_of_links(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    drive = use_drive(config, folder / "drive")
    drive.rmdir()
    drive.symlink_to(folder / "other")
    (folder / "other").symlink_to(drive)
    yield [str(drive), "symbolic links"]
    drive.unlink()
    drive.mkdir()


@mistake
def drive_is_read_only(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    drive = use_drive(config, folder / "drive")
    with mounted(drive, "-t", "tmpfs", "-o", "ro,size=16m", "none"):
        yield [str(drive), "Read-only file system", "is mounted read-only: name another directory"]


@mistake
def drive_is_not_ours(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    """As root every directory is writable: the answer of the kernel is put in at the seam."""
    drive = use_drive(config, folder / "drive")
    with seam.injected(FaultySyscalls(fail(errno.EACCES, on=("open", "mkdir"), path=f"{drive}/*"))):
        yield [str(drive), "Permission denied", "change its owner or mode, or name another directory"]


@mistake
def drive_is_in_use(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    drive = use_drive(config, folder / "drive")
    with held_by_another_process(drive / STATE_FOLDER) as pid:
        yield [str(drive / STATE_FOLDER), f"process {pid} is using this directory", "name another"]


@mistake
def run_dir_is_a_file(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    Path(config.run_dir).write_text("precious")
    yield [f"run_dir is {config.run_dir}", "not a directory"]
    assert Path(config.run_dir).read_text() == "precious"
    Path(config.run_dir).unlink()


@mistake
def run_dir_is_below_a_file(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    right, config.run_dir = config.run_dir, f"{config.data.files[0]}/run"
    yield [config.run_dir, "Not a directory"]
    config.run_dir = right


@mistake
def run_dir_is_read_only(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    Path(config.run_dir).mkdir()
    with mounted(Path(config.run_dir), "-t", "tmpfs", "-o", "ro,size=16m", "none"):
        yield [config.run_dir, "Read-only file system", "choose another directory"]


@mistake
def run_dir_is_in_use(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    with held_by_another_process(Path(config.run_dir)) as pid:
        yield [config.run_dir, f"process {pid} is using this directory"]


@mistake
def device_is_not_there(config: RunConfig, folder: Path) -> Iterator[list[str]]:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    config.train.device = "cuda"
    yield ["train.device is 'cuda'", "no CUDA device", "cpu"]
    config.train.device = "cpu"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


@pytest.mark.parametrize("spoil", MISTAKES, ids=lambda function: function.__name__)
def test_a_mistake_is_told_and_mended(command: Command, tmp_path: Path, spoil: Mistake) -> None:
    config = make_run(tmp_path, steps=1)
    config.checkpoint.at_end = False
    life = spoil(config, tmp_path)
    command.refused_train(config, said=next(life))
    nothing_is_half_made(config)
    # Tokenising can take hours: only what is known no sooner is told after it.
    told_late = spoil in (weights_are_nan, drive_is_in_use, tokenizer_is_larger_than_the_embedding)
    assert (Path(config.run_dir) / "data" / "tokens").exists() == told_late
    assert next(life, None) is None
    nothing_is_locked(config)
    status, _, err = command.train(config)
    assert (status, err) == (0, "")
    assert [record["step"] for record in records(config)] == [1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "optimizer: {leraning_rate: 1}",
            ["run.yaml:4", "unknown key optimizer.leraning_rate", "known here: lr,"],
        ),
        (
            "tiers: {nvme_dir: [/mnt]}",
            ["run.yaml:4", "unknown key tiers.nvme_dir", "did you mean tiers.nvme_dirs?"],
        ),
        ("train: {steps: ten}", ["run.yaml:4", 'train.steps is "ten"', "must be a whole number"]),
        ("train: {device: gpu}", ["train.device is 'gpu'", "must be cpu, cuda, or cuda:N"]),
        ("tiers: {dram: 8G}", ["run.yaml:4", 'tiers.dram is "8G"', "8GiB"]),
        ("model: {attention: flash}", ["model was set in line 2 already"]),
        ("train: {seed: [1]}", ["run.yaml:4", "train.seed is [1]", "whole number"]),
        ("train: steps", ["run.yaml:4", "train is a section"]),
        ("{", ["run.yaml:5", "is not valid YAML"]),
    ],
)
def test_a_run_file_with_a_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: str, said: list[str]
) -> None:
    """Told before anything is made; `tests/tools/test_train.py` has the options."""
    file = tmp_path / "run.yaml"
    file.write_text(f"run_dir: {tmp_path}/run\nmodel: {{config: tiny}}\ndata: {{files: [a.txt]}}\n{change}\n")
    status = cli.main(["train", str(file)])
    err = capsys.readouterr().err
    assert status == 2
    assert err.startswith(f"tierstream: error: {file}")
    assert len(err.splitlines()) == 1
    assert [text for text in said if text not in err] == [], err
    assert not (tmp_path / "run").exists()


def test_a_drive_that_a_killed_run_left_is_taken_over(
    command: Command, tmp_path: Path
) -> None:
    """Also the files with which it measured the drive."""
    config = make_run(tmp_path, steps=1)
    config.tiers.profile = None
    drive = use_drive(config, tmp_path / "drive")
    precious = drive / "precious"
    precious.write_text("not ours")
    assert command.train(config)[0] == 0
    left = drive / ".tierstream-scratch-0123456789ab"
    left.mkdir()
    (left / "file").write_text("left")
    config.run_dir = str(tmp_path / "second")
    assert command.train(config)[::2] == (0, "")
    assert sorted(entry.name for entry in drive.iterdir()) == ["precious", STATE_FOLDER]
    assert precious.read_text() == "not ours"
