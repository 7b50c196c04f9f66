"""The run file and options of `tierstream train`, against the real RunConfig."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstream.engine.byte_size import ByteSize
from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import dump, load
from tierstream.engine.config_tree import REQUIRED, leaves, option
from tierstream.tools import cli, train
from tierstream.tools.options import metavar, shown

#: Every option, its type and its default. They are an interface: a change here changes what run files mean.
OPTIONS = """\
--run-dir TEXT (required)
--model.path TEXT|null null
--model.config TEXT|null null
--model.vocab-size INT|null null
--model.freeze TEXT ...|null null
--model.train-only TEXT ...|null null
--model.dtype {bfloat16,float32} bfloat16
--model.attention {auto,sdpa,eager,sinks} auto
--model.trust-remote-code {true,false} false
--data.files TEXT ... (required)
--data.format {auto,text,prompt,alpaca,sharegpt,messages} auto
--data.text-field TEXT text
--data.train-on {answers,everything} answers
--data.chat-template TEXT|null null
--data.rewritten-turns {split,last,error} split
--data.bad-lines {error,skip} error
--data.tokenizer TEXT|null null
--data.vocab-size INT 4096
--data.seq-len INT 1024
--data.isolate-documents {true,false} true
--data.weights FLOAT ...|null null
--data.packing {auto,stream,whole,none} auto
--data.too-long {cut,drop,error,split} cut
--data.workers INT|null null
--data.streaming {true,false} false
--data.shuffle-window INT 4096
--data.cache-dir TEXT|null null
--optimizer.lr FLOAT 0.0001
--optimizer.beta1 FLOAT 0.9
--optimizer.beta2 FLOAT 0.95
--optimizer.eps FLOAT 1e-08
--optimizer.weight-decay FLOAT 0.1
--optimizer.weight-decay-by-name TEXT ...|null null
--optimizer.lr-scale-by-name TEXT ...|null null
--optimizer.clip-norm FLOAT|null 1.0
--optimizer.schedule {constant,linear,cosine,wsd} cosine
--optimizer.warmup-steps INT 0
--optimizer.min-lr-ratio FLOAT 0.1
--optimizer.decay-steps INT|null null
--optimizer.master {split,fp32} split
--optimizer.grad-dtype {float32,bfloat16} float32
--optimizer.check-finite {true,false} true
--optimizer.placement {auto,cpu,gpu,both} auto
--optimizer.threads INT|null null
--optimizer.max-skipped-in-a-row INT 5
--tiers.gpu SIZE|null null
--tiers.dram SIZE|null null
--tiers.nvme-dirs TEXT ...|null null
--tiers.resident INT|null null
--tiers.policy {lookahead,lru}|null null
--tiers.prefetch SIZE|null null
--tiers.writeback SIZE|null null
--tiers.page SIZE|null null
--tiers.activations {dram,gpu}|null null
--tiers.backend {auto,posix,kvikio} auto
--tiers.io-threads INT|null null
--tiers.profile TEXT|null null
--tiers.require-path {posix-direct,kvikio-compat,gds}|null null
--tiers.readback {off,sampled,full} sampled
--tiers.throttle.read SIZE|null null
--tiers.throttle.write SIZE|null null
--tiers.throttle.total SIZE|null null
--tiers.throttle.latency-s FLOAT 0.0
--moe.stream {experts,layers} experts
--moe.gpu-cache SIZE|null null
--moe.idle {dense,lazy,frozen} dense
--moe.aux-loss-coef FLOAT|null null
--moe.z-loss-coef FLOAT 0.0
--moe.bias-update-rate FLOAT 0.0
--train.steps INT|null null
--train.epochs FLOAT|null null
--train.rows-per-step INT 8
--train.rows-per-chunk INT|null null
--train.loss-chunk-tokens INT|null null
--train.z-loss-coef FLOAT 0.0
--train.seed INT 0
--train.device TEXT cpu
--train.kernels {plain,liger} plain
--train.compile {true,false} false
--train.deterministic {true,false} true
--train.debug {true,false} false
--train.log-samples {true,false} false
--train.trace-steps INT 0
--eval.files TEXT ...|null null
--eval.share FLOAT|null null
--eval.every-steps INT|null null
--eval.at-end {true,false} true
--eval.rows-per-step INT|null null
--eval.patience INT|null null
--eval.min-delta FLOAT 0.0
--sample.prompts TEXT ...|null null
--sample.every-steps INT|null null
--sample.at-end {true,false} true
--sample.max-tokens INT 64
--sample.temperature FLOAT 0.0
--sample.top-p FLOAT 1.0
--sample.chat {true,false}|null null
--checkpoint.every-steps INT|null null
--checkpoint.every-minutes FLOAT|null null
--checkpoint.keep INT 2
--checkpoint.keep-best {true,false} false
--checkpoint.at-end {true,false} true
--checkpoint.copy-memory SIZE|null null
--checkpoint.resume TEXT none
--checkpoint.allow-changed TEXT ...|null null
--log.tensorboard {true,false} false
--log.wandb TEXT|null null
--log.trackio TEXT|null null
--log.name TEXT|null null
"""

RUN = "run_dir: out\nmodel: {config: tiny}\ndata: {files: [a.txt]}\n"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command, in a directory that holds run.yaml; what it would train is printed instead."""

    def print_config(config: RunConfig) -> int:
        print(dump(config), end="")
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run_train", print_config)
    Path("run.yaml").write_text(RUN)

    def run_here(*args: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["train", *args])
        except SystemExit as end:  # --help
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return run_here


def test_options_are_frozen() -> None:
    lines = []
    for key, leaf in leaves(RunConfig).items():
        default = "(required)" if leaf.default is REQUIRED else shown(leaf.default)
        lines.append(f"{option(key)} {metavar(leaf.hint)} {default}\n")
    assert "".join(lines) == OPTIONS


def test_help_shows_every_option_with_documentation_and_default(run: Command) -> None:
    status, out, _ = run("--help")
    assert status == 0
    text = " ".join(out.replace("\u2502", " ").split())
    for key, leaf in leaves(RunConfig).items():
        default = "(required)" if leaf.default is REQUIRED else f"(default: {shown(leaf.default)})"
        assert leaf.doc, f"{key} has no documentation"
        assert f"{option(key)} {metavar(leaf.hint)} {leaf.doc} {default}" in text
    assert "Relative paths are relative to the current directory" in text
    assert max(map(len, out.splitlines())) <= 80


def test_the_file_then_the_options_decide(run: Command, tmp_path: Path) -> None:
    options = "--tiers.dram 8GiB --tiers.nvme_dirs a b --train.steps=7 --optimizer.clip-norm null"
    status, out, err = run("run.yaml", *options.split())
    assert (status, err) == (0, "")
    (tmp_path / "resolved.yaml").write_text(out)
    config = load(RunConfig, tmp_path / "resolved.yaml")
    expected = load(RunConfig, Path("run.yaml"))
    expected.tiers.dram, expected.tiers.nvme_dirs = ByteSize("8GiB"), ["a", "b"]
    expected.train.steps, expected.optimizer.clip_norm = 7, None
    assert config == expected
    assert run("resolved.yaml") == (0, out, "")


@pytest.mark.parametrize("option", ["--resume auto", "--resume=auto", "--checkpoint.resume auto"])
def test_resume_in_short(run: Command, option: str) -> None:
    status, out, err = run("run.yaml", *option.split())
    assert (status, err) == (0, "")
    assert "  resume: auto\n" in out
    assert "--checkpoint.resume" in run("run.yaml", "--help")[1]


@pytest.mark.parametrize(
    ("change", "args", "message"),
    [
        ("", "--optimiser.lr 3", "unknown option --optimiser.lr; did you mean --optimizer.lr?"),
        ("", "--steps 3", "unknown option --steps; did you mean --train.steps?"),
        ("", "--tiers.dram 8G", '--tiers.dram is "8G"; it must be a size such as 8GiB, 512MiB, 1.5GB or '
         "1048576 (bytes), or null"),
        ("", "--train.device", "--train.device takes one value, got 0"),
        ("", "--optimizer.placement gpu", "run.yaml with the options given: optimizer.placement is gpu and "
         "train.device is cpu, so there is no GPU to update on; use optimizer.placement: auto or cpu, or "
         "train.device: cuda"),
        ("", "--optimizer.check-finite false", "run.yaml with the options given: optimizer.check_finite is "
         "false and optimizer.clip_norm is 1.0: clipping waits for the whole gradient, so the check costs "
         "nothing; set clip_norm to null, or check_finite to true"),
        ("", "--run-dir=", "run.yaml with the options given: run_dir is empty; name a directory, or . for "
         "the current one"),
        ("tiers: {require_path: gds}", "", "run.yaml: tiers.require_path is gds, but no drive is named; name "
         "some in tiers.nvme_dirs, or leave it out"),
        ("tiers: {nvme_dirs: ['']}", "", "run.yaml: tiers.nvme_dirs is ['']; name each directory once, or "
         "null for none"),
        ("tiers: {nvme_dirs: [drive, ./drive/]}", "", "run.yaml: tiers.nvme_dirs is ['drive', './drive/']; "
         "name each directory once, or null for none"),
        ("", "--train.steps 0", "run.yaml with the options given: train.steps is 0; it must be >= 1"),
        # No accumulation of nothing (C13).
        ("train: {rows_per_step: 0}", "", "run.yaml: train.rows_per_step is 0; it must be >= 1"),
        ("train: {rows_per_chunk: 0}", "", "run.yaml: train.rows_per_chunk is 0; it must be between 1 and "
         "train.rows_per_step (8), or null for all rows"),
        ("", "--model.path x", "run.yaml with the options given: give exactly one of model.path (train on "
         "from these weights) and model.config (start from random weights); got model.path='x' and "
         "model.config='tiny'"),
        ("optimiser: {lr: 3}", "", "run.yaml:4: unknown key optimiser; did you mean optimizer?"),
        ("lr: 3", "", "run.yaml:4: unknown key lr; did you mean optimizer.lr?"),
        ("train: {lr: 3}", "", "run.yaml:4: unknown key train.lr; did you mean optimizer.lr?"),
        ("optimizer: {lr: -1}", "", "run.yaml: optimizer.lr is -1.0; it must be a finite number >= 0"),
        ("tiers: {io_threads: 0}", "", "run.yaml: tiers.io_threads is 0; it must be >= 1"),
        ("checkpoint: {at_end: no}", "", 'run.yaml:4: checkpoint.at_end is "no"; it must be true or false'),
        ("run_dir: b", "", "run.yaml:4: run_dir was set in line 1 already; keep one of the two"),
    ],
)  # fmt: skip
def test_mistakes_get_one_message_and_status_2(run: Command, change: str, args: str, message: str) -> None:
    Path("run.yaml").write_text(RUN + change)
    assert run("run.yaml", *args.split()) == (2, "", f"tierstream: error: {message}\n")


def test_what_must_be_given_is_named(run: Command) -> None:
    Path("run.yaml").write_text("model: {config: tiny}")
    said = "run_dir and data.files must be set, there or on the command line (--run-dir --data.files)"
    assert run("run.yaml") == (2, "", f"tierstream: error: run.yaml: {said}\n")


@pytest.mark.parametrize("tiers", ["nvme_dirs: [none]", "nvme_dirs: [file]", "nvme_dirs: [.], profile: none"])
def test_a_path_that_is_wrong_is_told_before_torch_is_imported(tmp_path: Path, tiers: str) -> None:
    """In the first second, not after the imports."""
    (tmp_path / "file").touch()
    (tmp_path / "run.yaml").write_text(
        f"run_dir: run\nmodel: {{config: tiny}}\ndata: {{files: [a.txt]}}\ntiers: {{{tiers}}}\n"
    )
    code = (
        "import sys; from tierstream.tools.cli import main; status = main(['train', 'run.yaml']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run.yaml"]
