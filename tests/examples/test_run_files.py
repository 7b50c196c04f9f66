"""Every run file of `examples`, and the script, runs when its paths are those of a tiny project."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from support.project import make_data, save_model, shrink
from support.runs import made_up_profile, records

from tierstream.engine.config import RunConfig
from tierstream.engine.config_file import dump
from tierstream.engine.planner.case import units_of
from tierstream.engine.planner.machine import Machine
from tierstream.engine.planner.machines import machine_file
from tierstream.engine.planner.outlook import look_ahead
from tierstream.engine.planner.remedies import check_fits, with_remedies
from tierstream.engine.planner.what_if import Setting
from tierstream.engine.trainer import Trainer
from tierstream.io.errors import BudgetError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Models too large to run here, whose config.json lies beside them.
PLANNED = sorted(path for path in EXAMPLES.glob("*.yaml") if path.with_suffix("").is_dir())
RUN_FILES = sorted({*EXAMPLES.glob("*.yaml")} - {EXAMPLES / "demo.yaml", *PLANNED})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    save_model(folder / "dense")
    save_model(folder / "experts", experts=True)
    make_data(folder)
    made_up_profile(folder)
    return folder


def in_project(run_file: Path, project: Path, run_dir: Path) -> RunConfig:
    """The run with the paths of the project, small."""
    config = shrink(RunConfig.from_file(run_file), project / "machine.json")
    config.run_dir = str(run_dir)
    config.model.path = str(project / ("experts" if run_file.stem.startswith("moe") else "dense"))
    files = [
        project / ("corpus/*.txt" if name.endswith(".txt") else "chat.jsonl") for name in config.data.files
    ]
    config.data.files = [str(name) for name in files]
    if config.eval.files is not None:
        config.eval.files = [str(project / "held-out.jsonl")]
    if config.tiers.nvme_dirs is not None:
        drives = [run_dir.parent / f"drive-{number}" for number in range(len(config.tiers.nvme_dirs))]
        for drive in drives:
            drive.mkdir()
        config.tiers.nvme_dirs = [str(drive) for drive in drives]
    return config


def test_there_are_examples() -> None:
    assert len(RUN_FILES) == 5
    assert [path.stem for path in PLANNED] == ["gpt-oss-120b", "moe-1t"]


@pytest.mark.parametrize("run_file", [*RUN_FILES, *PLANNED], ids=lambda path: path.stem)
def test_a_run_file_says_for_whom_it_is_and_what_it_needs(run_file: Path) -> None:
    config = RunConfig.from_file(run_file)
    header = run_file.read_text().partition("\nrun_dir:")[0]
    for word in ("For whom:", "Needs:", "Change:", f"tierstream train examples/{run_file.name}"):
        assert word in header
    assert config.run_dir == f"runs/{run_file.stem}"
    for key in re.findall(
        r"(?:model|data|eval|tiers)\.\w+(?=[,. ]|$)", header.partition("Change:")[2].partition("\n")[0]
    ):
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) is not None, key


@pytest.mark.parametrize("run_file", PLANNED, ids=lambda path: path.stem)
def test_a_run_file_to_plan_fits_the_machine_that_it_names(run_file: Path) -> None:
    config = RunConfig.from_file(run_file)
    named = re.search(r"tierstream plan \S+ --machine (\S+)", run_file.read_text())
    assert named is not None
    machine = Machine.from_profile(machine_file(named[1]), config.optimizer.threads_of)
    setting, model = Setting(config, machine), units_of(config)
    check_fits(setting, model)
    if config.moe.gpu_cache is None:
        return
    usual = setting.with_config({"moe.gpu_cache": None})
    with pytest.raises(BudgetError) as caught:
        check_fits(usual, model)
    assert f"moe.gpu_cache: {config.moe.gpu_cache}" in str(with_remedies(caught.value, usual, model))


@pytest.mark.parametrize("run_file", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_runs(project: Path, tmp_path: Path, run_file: Path) -> None:
    config = in_project(run_file, project, tmp_path / "run")
    summary = Trainer(config).run()
    assert summary.last_step == 2
    assert summary.checkpoint is not None
    assert all(record["trained_tokens"] for record in records(config))


def test_a_large_model_is_planned_by_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    machine = Machine.from_profile(machine_file("workstation"))
    outlook = look_ahead(RunConfig.from_file(PLANNED[0]), machine, compare=False).outlook
    assert outlook.parameters == 116_829_156_672
    assert outlook.tiers[-1].used_bytes > 12 * outlook.parameters
    assert outlook.step_s > max(outlook.bound_s.values())
    assert outlook.resource == "/mnt/nvme0"
    assert outlook.grain > 10


def test_the_script_trains_and_is_told(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = in_project(EXAMPLES / "small-machine.yaml", project, tmp_path / "run")
    (tmp_path / "run.yaml").write_text(dump(config))
    monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path / "run.yaml")])
    runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"step 1: loss \d\.\d{4}, [\d,]+ tokens/s\nstep 2: loss", out)
    assert "saved " in out
    assert "trained on " in out
