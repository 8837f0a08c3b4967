"""What is tried: every command's fields and files, times kinds of bad values. Nothing is run here."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

MOST_OF_A_KIND = 20

VALUES: dict[str, tuple[str, ...]] = {
    "empty": ("", " ", "\t", "\n", ",", "''", "null", "~"),
    "type": ("x", "1.5", "true", "[1]", "{a: 1}", "[[1], [2]]", "1e3", "0x1f", "1,2", "-", "--", "!!int x"),
    "sign": ("-1", "-0.5", "-0", "+1", "-1e300", "−1"),
    "size": ("0", "1e400", "9" * 400, "1e-320", str(2**63), str(2**31), "1" * 20, ".inf", ".nan", "nan"),
    "nesting": ("[" * 2000, "[" * 60 + "]" * 60, "{a: " * 3000, "- " * 500, "&a [*a]", "x" * 100_000),
    "encoding": ("é\u202e", "\x1b[31mred", "a\nb", "\udcff\udcfe", "\ufeffx", "\u0661", "a\u2028b", "日本"),
    "path": (
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "/",
        ".",
        "..",
        "nope/nope",
        "a" * 300,
        "bad/fifo",
        "bad/loop",
        "bad/dangling",
        "bad/folder",
        "bad/empty",
        "bad/garbage",
        "bad/file/x",
        "~",
    ),
}
FILES = (
    "folder",
    "fifo",
    "device",
    "full",
    "loop",
    "dangling",
    "truncated",
    "garbage",
    "empty",
    "huge",
    "nested",
    "utf16",
    "list",
    "text",
    "socket",
    "missing",
    "zeros",
    "appended",
    "byte",
    "deep yaml",
)
LEAVES: dict[str, tuple[object, ...]] = {
    "leaf type": (None, "x", True, [], {}, [1], {"a": 1}, 1.5, [[1]], ""),
    "leaf sign": (-1, -0.5, -(2**40)),
    "leaf size": (0, 10**400, 2**63, 2**31, 1e300, "9" * 5000, 10**9),
    "leaf nesting": ([[[[[[1]]]]]], {"a": {"a": {"a": {}}}}, "[" * 5000),
    "leaf encoding": ("\x1b[2J", "\u202e", "../../etc/passwd", "/dev/zero", "a\x00b", "\ud800"),
}
ENVIRONMENT = re.findall(
    r"\w+",
    "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE DS_ACCELERATOR CUDA_VISIBLE_DEVICES "
    "GLOO_SOCKET_IFNAME TORCHINDUCTOR_CACHE_DIR HF_HOME MPLBACKEND WANDB_MODE OMP_NUM_THREADS TMPDIR COLUMNS "
    "LINES HOME XDG_CACHE_HOME MPLCONFIGDIR TERM LC_ALL SLURM_PROCID HF_HUB_OFFLINE",
)


WITH_ENVIRONMENT = ("main", "generate", "plots", "prepare", "study report")


@dataclass(frozen=True)
class Command:
    """A command as it is valid, and what can be made bad in it."""

    name: str
    module: str
    """Its module has ``main(arguments)``; a file is run as a script."""
    arguments: tuple[str, ...]
    flags: tuple[str, ...] = ()
    """Flags, and (``<MODEL>``) arguments by place, which are among *arguments* under that name."""
    files: tuple[str, ...] = ()
    """Files that it reads, below the world's folder."""


@dataclass(frozen=True)
class Case:
    """One bad input."""

    command: Command
    field: str
    kind: str
    value: object
    arguments: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    file: str | None = None
    """The file to spoil, as *kind* and *value* say."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What there are at most MOST_OF_A_KIND of."""
        return self.command.name, self.field, self.kind


STEP = "runs/one/checkpoints/step_000002"
RUN_FILES = (
    f"{STEP}/state.json",
    f"{STEP}/manifest.json",
    "runs/one/config.yaml",
    "runs/one/latest",
    f"{STEP}/weights_and_optimizer/rank_00000.safetensors",
    f"{STEP}/weights_and_optimizer/index.json",
    f"{STEP}/tokenizer/tokenizer.model",
    STEP,
    "runs/one/checkpoints",
)
METRICS = ("runs/one/metrics.jsonl",)
CORPUS = tuple(
    f"data/mine/{name}"
    for name in (
        "meta.json",
        "training.bin",
        "training.idx",
        "validation.idx",
        "tokenizer/tokenizer.model",
        "tokenizer",
    )
)
HF = tuple(
    f"hf/one/{name}"
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    )
)
MAIN = ("--config", "recipe.yaml", "--ds_config", "ds.json", "--data", "data/mine", "--name", "two")


def commands(run_flags: list[str]) -> list[Command]:
    """All commands; *run_flags* are those of pretrain/main.py."""

    def make_command(name: str, module: str, arguments: str, flags: str = "", *files: str) -> Command:
        return Command(name, module, tuple(arguments.split()), tuple(flags.split()), files)

    script = "pretrain/main.py"
    return [
        Command(
            "main",
            script,
            MAIN,
            (*run_flags, "--config", "--ds_config", "--plot_lr"),
            ("recipe.yaml", "ds.json", "model.json", *CORPUS),
        ),
        Command(
            "resume",
            script,
            (*MAIN[:-1], "one"),
            ("--steps", "--seed", "--model", "--runs_dir"),
            (*RUN_FILES, *METRICS, "runs/one/decisions.json", *CORPUS),
        ),
        Command(
            "plot_lr",
            script,
            ("--config", "recipe.yaml", "--plot_lr", "lr.png"),
            ("--plot_lr", "--lr_rules", "--schedule.warmup"),
            ("recipe.yaml",),
        ),
        Command(
            "plan",
            "pretrain.plan.command",
            ("--config", "recipe.yaml", "--ds_config", "ds.json"),
            (
                "--nodes",
                "--gpus_per_node",
                "--gpu",
                "--gpu_memory",
                "--peak_tflops",
                "--mfu",
                "--rates",
                *run_flags[::4],
            ),
            ("recipe.yaml", "ds.json", "model.json"),
        ),
        make_command(
            "generate",
            "pretrain.generate",
            "runs/one --tokens 3",
            "runs/one --prompt --tokens --temperature --top_p --seed --step",
            *RUN_FILES,
        ),
        make_command("generate hf", "pretrain.generate", "hf/one --tokens 3", "hf/one", *HF),
        make_command(
            "convert",
            "pretrain.convert",
            "runs/one --out hf/two",
            "runs/one --out --step --format --dtype --license",
            *RUN_FILES,
        ),
        make_command(
            "from_hf", "pretrain.convert", "--from_hf hf/one --out runs/three", "--from_hf --out", *HF
        ),
        make_command(
            "evaluation",
            "pretrain.evaluation.command",
            "runs/one --tasks piqa --data_dir sets --limit 1 --out scores.json",
            "runs/one --tasks --include_path --num_fewshot --data_dir --step --last --limit --batch_tokens "
            "--dtype --out",
            *RUN_FILES,
            "sets/baber/piqa/default/validation.jsonl",
            "task.yaml",
        ),
        make_command(
            "evaluation follow",
            "pretrain.evaluation.command",
            "runs/one --tasks piqa --data_dir sets --limit 1 --follow --follow_timeout 1",
            "runs/one --follow_timeout --step --last --out",
            *RUN_FILES,
            *METRICS,
            "runs/one/decisions.json",
        ),
        make_command(
            "evaluation save",
            "pretrain.evaluation.command",
            "save --tasks piqa --data_dir sets",
            "--tasks --data_dir --include_path",
            "task.yaml",
        ),
        make_command(
            "diagnostics",
            "pretrain.diagnostics.command",
            "runs/one --out plots --sequences 1 --steps 2",
            "runs/one --data --out --sequences --steps --baseline",
            *RUN_FILES,
            *METRICS,
            *CORPUS,
        ),
        make_command(
            "growth",
            "pretrain.growth.__main__",
            "report runs/one --sequences 1 --out grown",
            "runs/one report --step --sequences --out",
            *RUN_FILES,
            *CORPUS,
        ),
        make_command(
            "plots",
            "pretrain.plots.command",
            "runs/one --out curves.png",
            "runs/one --out",
            *METRICS,
            "runs/one/config.yaml",
        ),
        make_command(
            "presets", "pretrain.presets", "prism-nano --plot heads.png", "prism-nano --plot", "model.json"
        ),
        make_command(
            "exchange",
            "pretrain.presets",
            "exchange --model prism-nano --tensor_parallel 2",
            "exchange --model --tensor_parallel --heads --micro_batch",
            "model.json",
        ),
        make_command(
            "context",
            "pretrain.presets",
            "context --model prism-nano --context_parallel 2",
            "context --model --context_parallel --heads --context_length",
            "model.json",
        ),
        make_command(
            "allocations",
            "pretrain.presets",
            "allocations tapered(128) --mean 128 --layers 4",
            "tapered(128) --mean --layers --multiple --plot",
        ),
        make_command(
            "prepare",
            "pretrain.prepare.command",
            "--out data/new --text text --train_tokenizer 300 --processes 1",
            "--out --text --format --column --max_document_bytes --tokenizer --train_tokenizer "
            "--validation_fraction --validation_text --validation_split --max_tokens --processes --shard",
            "text/a.txt",
            "text",
        ),
        make_command(
            "prepare dataset",
            "pretrain.prepare.command",
            "--out data/new --dataset ./sets/baber/piqa/default --split validation --column goal "
            "--tokenizer data/mine/tokenizer --processes 1",
            "--dataset --subset --split --revision --column",
            "sets/baber/piqa/default/validation.jsonl",
        ),
        make_command(
            "prepare again",
            "pretrain.prepare.command",
            "--out data/new --text text --tokenizer hf/one --processes 1",
            "",
            "hf/one/tokenizer.json",
            "hf/one/tokenizer_config.json",
        ),
        make_command(
            "prepare rows",
            "pretrain.prepare.command",
            "--out data/new --text rows.jsonl --tokenizer data/mine/tokenizer --processes 1",
            "--column --format",
            "rows.jsonl",
        ),
        make_command(
            "labelled",
            "pretrain.prepare.command",
            "labelled --train labels.jsonl --out data/labels --train_tokenizer 300",
            "--train --out --validation --validation_fraction --text_column --label_column --tokenizer "
            "--train_tokenizer",
            "labels.jsonl",
        ),
        make_command(
            "study run",
            "pretrain.study.command",
            "run study.yaml --dry_run --out runs/s",
            "study.yaml --out --parallel --sbatch --settings.steps",
            "study.yaml",
            "recipe.yaml",
        ),
        make_command(
            "study list",
            "pretrain.study.command",
            "list study.yaml --out runs/s",
            "study.yaml --out",
            "study.yaml",
        ),
        make_command(
            "study task",
            "pretrain.study.command",
            "task study.yaml 0 --out runs/s --ranks 2",
            "study.yaml 0 --out --ranks",
            "study.yaml",
        ),
        make_command(
            "study record",
            "pretrain.study.command",
            "record runs/done --to recorded.json",
            "runs/done --out --to",
        ),
        make_command(
            "study power",
            "pretrain.study.command",
            "power study.yaml --sd 0.1 --effect 0.1",
            "study.yaml --pilot --sd --effect --power",
            "study.yaml",
        ),
        make_command(
            "study report",
            "pretrain.study.command",
            "report runs/done",
            "runs/done --out",
            "runs/done/study.yaml",
            *(
                f"runs/done/{name}"
                for name in (
                    "a-s1/metrics.jsonl",
                    "a-s1/config.yaml",
                    "a-s1/latest",
                    "a-s1/checkpoints",
                    "a-s1/checkpoints/step_000002/state.json",
                    "tasks.txt",
                    "logs",
                )
            ),
        ),
    ]


def all_cases(run_flags: list[str]) -> Iterator[Case]:
    """Every case there is, those of a key after another."""
    for command in commands(run_flags):
        for flag in command.flags:
            for kind, values in VALUES.items():
                for value in values[:MOST_OF_A_KIND]:
                    yield Case(command, flag, kind, value, _with(command.arguments, flag, value))
        for name in command.files:
            arguments = command.arguments
            if name == "model.json":
                arguments = _with(arguments, "prism-nano" if command.name == "presets" else "--model", name)
            elif name == "task.yaml":
                arguments = _with(arguments, "--tasks", name)
            for kind in FILES:
                yield Case(command, name, kind, None, arguments, file=name)
            if name.endswith((".json", ".yaml", ".jsonl")):
                for kind, leaves in LEAVES.items():
                    for number, leaf in enumerate(leaves * 3):
                        if number < MOST_OF_A_KIND:
                            yield Case(command, name, kind, (number, leaf), arguments, file=name)
        for variable in ENVIRONMENT if command.name in WITH_ENVIRONMENT else ():
            for kind, values in VALUES.items():
                for value in values[:3] if kind != "nesting" else ():
                    yield Case(command, f"${variable}", kind, value, command.arguments, {variable: value})


def _with(arguments: tuple[str, ...], flag: str, value: str) -> tuple[str, ...]:
    """The arguments with the flag's value, or the argument called *flag*, replaced."""
    if not flag.startswith("--"):
        return tuple(value if argument == flag else argument for argument in arguments)
    given = list(arguments)
    if flag in given:
        place = given.index(flag)
        del given[place : place + 2]
    return (*given, f"{flag}={value}")


def _waits_rightly(case: Case) -> bool:
    """Whether the command waits for a pipe that it is meant to read: a text."""
    if case.value == "bad/fifo":
        return case.field in ("--text", "--validation_text", "--train", "--validation")
    return case.kind == "fifo" and case.file in ("rows.jsonl", "labels.jsonl")


def chosen(run_flags: list[str], count: int, seed: int, only: str = "") -> list[Case]:
    """*count* of all cases, the commands in turn, and of each command its fields."""
    rng = random.Random(seed)
    by_command: dict[str, list[Case]] = {}
    for case in all_cases(run_flags):
        if only in " ".join(case.key) and not _waits_rightly(case):
            by_command.setdefault(case.command.name, []).append(case)
    for cases in by_command.values():
        rng.shuffle(cases)
    found: list[Case] = []
    while by_command and len(found) < count:
        for name in list(by_command):
            found.append(by_command[name].pop())
            if not by_command[name]:
                del by_command[name]
    return found[:count]
