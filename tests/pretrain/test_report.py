"""Lines that are printed to be pasted, and what a run says of itself."""

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from model.config import ModelConfig
from model.transformer import Transformer
from pretrain import cli, generate, report
from pretrain.config.run_config import RunConfig
from pretrain.metrics import build
from pretrain.run.decisions import Decision
from pretrain.runtime import environment
from pretrain.runtime.environment import continue_command
from pretrain.validation.hook import ValidationHook
from pretrain.validation.loss import ValidationResult
from tests.helpers.refusals import refusal

RULES = "[{name: slow, parameters: [q, k], scale: 0.25, hold: 0.04}]"
NASTY = "$(touch /tmp/pwned); x 'y'"
LAUNCHER_VARIABLES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES")
EIGHT = "RANK=0 WORLD_SIZE=8"
# What the launcher told the ranks, and the command that starts them again.
LAUNCHERS = {
    "": "head-schedules train",
    "LOCAL_SIZE=1": "deepspeed",
    "LOCAL_SIZE=4": "deepspeed --num_accelerators 4",
    "LOCAL_SIZE=2 CUDA_VISIBLE_DEVICES=0,1": "deepspeed --num_accelerators 2",
    "LOCAL_SIZE=2 CUDA_VISIBLE_DEVICES=2,3": "deepspeed --include localhost:2,3",
    "LOCAL_SIZE=1 CUDA_VISIBLE_DEVICES=3": "deepspeed --include localhost:3",
    "LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none": "torchrun --nproc_per_node 2 -m",
    f"{EIGHT} LOCAL_SIZE=4": "deepspeed --hostfile hostfile --num_nodes 2 --num_accelerators 4",
    f"{EIGHT} LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x": "torchrun --nnodes 2 --nproc_per_node 4 -m",
}


@pytest.mark.parametrize(("environment", "launcher"), LAUNCHERS.items())
def test_the_command_that_goes_on_can_be_pasted(monkeypatch, environment, launcher):
    for name in ("RANK", "WORLD_SIZE", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for variable in environment.split():
        monkeypatch.setenv(*variable.split("=", 1))
    given = ["--ds_config", "my configs/zero1.json", "--name", NASTY, "--lr_rules", RULES]
    main = {"deepspeed": ["--module", "pretrain.main"], "torchrun": ["pretrain.main"]}
    expected = [*launcher.split(), *main.get(launcher.split()[0], []), "--seed", "3", *given, "--steps", "24"]
    for steps in ([], ["--steps=12"], ["--steps", "12"]):
        command = continue_command(["--seed", "3", *steps, *given, "--local_rank=0"], 24)
        assert shlex.split(command) == expected


@pytest.mark.parametrize("given", ["--resume never --seed 3", "--seed 3 --resume=never"])
def test_the_run_of_resume_never_is_continued_without_it(monkeypatch, given):
    monkeypatch.setattr(environment, "find_launchers", list)
    assert continue_command(given.split(), 24).endswith(" --seed 3 --steps 24")
    assert "resume" not in continue_command(given.split(), 24)
    # It may be a setting of the file.
    assert continue_command(given.split(), 24, never=True).endswith(" --seed 3 --resume auto --steps 24")


TYPED = [
    ("/e/bin/python /e/bin/torchrun --nnodes 2 --rdzv_endpoint h:1 pretrain/main.py", "torchrun"),
    ("/e/bin/python /e/bin/deepspeed --num_accelerators 2 --module pretrain.main", "deepspeed"),
    ("/e/bin/python -m torch.distributed.run pretrain/main.py", "python -m torch.distributed.run"),
]


@pytest.mark.parametrize(("line", "begins"), TYPED)
def test_the_launcher_that_was_used_is_printed(monkeypatch, line, begins):
    monkeypatch.setattr(environment.shutil, "which", lambda name: name if name == begins else None)
    other = SimpleNamespace(cmdline=lambda: ["python", "-m", "pretrain.study", "run", "x"])
    own = SimpleNamespace(cmdline=lambda: [*line.split(), "--seed", "3", "--steps", "12"])
    monkeypatch.setattr(environment, "find_launchers", lambda: [own, other])
    command = continue_command(["--local_rank=0", "--seed", "3", "--steps", "12"], 24)
    assert command == " ".join([begins, *line.split(begins.split()[-1], 1)[1].split(), "--seed 3 --steps 24"])


ALONE = [
    "/e/bin/python /e/bin/head-schedules train",
    "/e/bin/python3.12 -m pretrain.main",
    "/e/bin/python pretrain/main.py",
]


@pytest.mark.parametrize("line", ALONE)
@pytest.mark.parametrize("given", ["", "--seed 3 --steps 12"])
def test_one_process_is_continued_by_the_command_that_started_it(monkeypatch, line, given):
    """The launcher would start a rank for each GPU."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)  # by the run itself, for the process group
    monkeypatch.setattr(environment.shutil, "which", lambda name: name if name == "head-schedules" else None)
    monkeypatch.setattr(environment.sys, "orig_argv", [*line.split(), *given.split()])
    command = continue_command(given.split(), 24)
    assert (
        command
        == f"{line.removeprefix('/e/bin/python ' if 'head' in line else '').removeprefix('/e/bin/')}"
        + (" --seed 3" if given else "")
        + " --steps 24"
    )


@pytest.mark.parametrize("line", ["", "env DATA='a b' sbatch --nodes=2 slurm/124m.sh --steps 4 --seed 3"])
def test_in_a_job_the_sbatch_line_is_printed(monkeypatch, line):
    monkeypatch.setenv("SUBMIT_LINE", line)
    expected = "env 'DATA=a b' sbatch --nodes=2 slurm/124m.sh --seed 3 --steps 24" if line else None
    assert continue_command(["--config", "124m", "--seed", "3"], 24) == expected


MEASURED = "measured: the fastest fp32 product of square matrices (n = 512) on 2 CPU threads"


@pytest.mark.parametrize(("source", "compares"), [(MEASURED, False), ("data sheet of an H100, bf16", True)])
def test_a_measured_peak_is_said_not_to_compare(source, compares):
    line = build.describe_mfu(1e6, 1e12, source)
    assert line.startswith("MFU      = tokens/s x 1.0 MFLOP per token") and "/ 1 TFLOP/s (" in line
    assert ("compare tokens/s between sessions, not MFU" in line) != compares


def test_commands_for_the_next_steps_are_quoted(tmp_path, monkeypatch):
    hook = SimpleNamespace(name="h", summarize=lambda session: [])
    lines, _ = closing_of(tmp_path / NASTY, monkeypatch, hook)
    commands = {words[0]: words[1:] for words in map(shlex.split, lines[lines.index("next") + 1 :])}
    folder, program = str(tmp_path / NASTY), "head-schedules"
    assert commands["convert"] == [program, "convert", folder, "--out", f"hf/{Path(NASTY).name}"]
    assert commands["evaluate"] == [program, "evaluate", folder, "--tasks", "hellaswag,piqa"]
    assert commands["continue"][-2:] == ["--steps", "4"]


def test_without_matplotlib_a_run_ends_with_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "train_loss": 3.0}\n')
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    hook = SimpleNamespace(name="h", summarize=lambda session: [])
    install = "matplotlib: not installed; pip install 'head-schedules[plots]'"
    lines, _ = closing_of(tmp_path, monkeypatch, hook)
    assert f"note     no results of plots, everything is saved ({install})" in lines
    assert refusal(capsys, cli.main, "presets", "prism-nano", "--plot", "a.png").endswith(f"error: {install}")


def closing_of(folder, monkeypatch, hook, is_text=True, is_main=True):
    """The closing lines of a session whose hook has measured, and what was done for them, in order."""
    did = []
    monkeypatch.setattr(generate, "sample_text", lambda *_: did.append("sample") or "a\nb")
    closing, hook.summarize = hook.summarize, lambda session: did.append("count") or closing(session)
    made = SimpleNamespace
    run = made(folder=folder, steps=2, run_name=folder.name, resume="auto", validation=made(sequences=1))
    run.logging = made(sample=96)
    monkeypatch.setattr(report, "weights_are_finite", lambda _: True)
    world, store = (
        made(is_main=is_main, size=1, gather=lambda value: [value]),
        made(path=lambda step: folder / f"step_{step}"),
    )
    parts = {"world": world, "data": made(is_text=is_text), "model_config": made(context_length=8)}
    session = made(run=run, finished=True, **parts)
    state = made(step=2, tokens=10, seconds=1.0, skipped=0)
    parts = {"engine": None, "data_share": 0.0, "metrics": made(close=lambda: None)}
    parts |= {"hooks": [hook], "store": store}
    trainer = made(
        session=session, run=run, state=state, control=made(listener=made(mark_saved=nullcontext)), **parts
    )
    return report.describe_closing(trainer, []), did


@pytest.mark.parametrize("rank", [0, 1])
def test_at_the_end_only_rank_0_counts_and_speaks(tmp_path, monkeypatch, rank):
    """The others take part in the sample, which is collective and comes first: none waits for rank 0."""
    monkeypatch.setattr("pretrain.validation.hook.compare_baselines", lambda *_: "guessing 3")
    hook = ValidationHook.__new__(ValidationHook)
    hook.result = ValidationResult(3.0, 2.0)
    lines, did = closing_of(tmp_path, monkeypatch, hook, is_main=rank == 0)
    if rank:
        assert (did, lines) == (["sample"], [])
    else:
        assert did == ["sample", "count"]
        assert "compare  bits per byte of the same windows: the model 2.0000, guessing 3" in lines


# The setting, classes and the tensor-parallel degree.
ALL, LOSS = "q, k, v; gate, up", "LM head and loss"
FUSED = [
    ("all", None, 1, f"{ALL}; {LOSS}"),
    ("all", 3, 1, ALL),
    ("all", None, 2, ALL),
    ("loss", None, 1, LOSS),
    ("loss", None, 2, "nothing"),
    ("none", 3, 1, "nothing"),
]


@pytest.mark.parametrize(("fused", "classes", "t", "expected"), FUSED)
def test_what_is_fused(fused, classes, t, expected):
    made = SimpleNamespace
    decisions, model, world = made(fused=Decision(fused, "")), made(classes=classes), made(tensor_parallel=t)
    assert report._describe_fused(made(decisions=decisions, model_config=model, world=world)) == expected


SHAPES = [
    ({}, 1, "1 block shape, the final norm and the loss, which takes about 30s"),
    ({"heads": (2, 4, 8, 8)}, 3, "3 block shapes, the final norm and the loss, which takes about 50s"),
    ({"local_window": (8, None, None, 8)}, 2, "2 block shapes"),
    ({"rope_base": (1e4, None, 1e5, None)}, 2, "2 block shapes"),
    ({"heads": (4, 0, 4, 0), "local_window": (None, 8, None, None)}, 2, "2 block shapes"),
    ({"ffn_width": (64, 96, 128, 160)}, 4, "4 block shapes"),
]


@pytest.mark.parametrize(("fields", "graphs", "expected"), SHAPES)
def test_the_first_step_says_how_much_it_compiles(fields, graphs, expected):
    """A graph for each distinct block, as torch counts them."""
    given = {"vocab_size": 64, "d_model": 32, "heads": (4,) * 4, "ffn_width": 64, "context_length": 16}
    model = ModelConfig(**given | fields)
    decisions = SimpleNamespace(compile=Decision(True, "as set"))
    line = report._describe_compiling(SimpleNamespace(decisions=decisions, model_config=model), False)
    assert expected in line and "(as set)" not in line
    torch._dynamo.reset()
    counter = CompileCounter()
    network = Transformer(model, attention="blocks")
    for block in network.layers:
        block.compile(backend=counter)
    network(torch.zeros(1, 16, dtype=torch.long))
    assert counter.frame_count == graphs


def test_a_run_of_a_study_is_grouped_by_it(tmp_path):
    """Its name is the folder's that holds the study's file; other folders of runs group nothing."""
    run = RunConfig(runs_dir=str(tmp_path / "order"))
    assert build._study(run) is None
    (tmp_path / "order").mkdir()
    (tmp_path / "order/study.yaml").touch()
    assert build._study(run) == "order"
