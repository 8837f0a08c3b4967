"""``python -m pretrain.study``: runs studies, plans their size, and reports what they show."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from model.errors import INTERRUPTED, UserError, run_command, shown
from pretrain.config.command_line import CommandParser as Parser
from pretrain.config.run_config import is_folder_name
from pretrain.runtime.signals import STOPPED
from pretrain.study.contrasts import full_name
from pretrain.study.pilots.halving import RungResult, drop, write_kept
from pretrain.study.pilots.tuning import choose_all, write_tuned
from pretrain.study.planned import HIGHER_IS_BETTER, PlannedRun, Study
from pretrain.study.results import (
    CONFIGS,
    STUDY_FILE,
    TASKS_FILE,
    check_settings,
    failed_mark,
    failure,
    load_results,
    run_state,
    some_names,
    study_of,
    task_names,
    unfinished,
    unnamed_line,
    unnamed_runs,
)
from pretrain.study.scheduler import (
    ROOT,
    Scheduler,
    Slot,
    check_runs,
    ds_config_path,
    most_ranks,
    slots,
    write_study,
)
from pretrain.study.settings import label
from pretrain.study.slurm import run_of_task, sbatch_commands, submit
from pretrain.study.study_file import find_study, parse_study, pilot_of, read_study, rung_of, study_names
from pretrain.utils.files import write_atomically
from pretrain.utils.tables import aligned
from pretrain.utils.text import say

SOME_FAILED = 1


def build_parser() -> Parser:
    """Build the parser of the command line."""
    parser = Parser(
        prog="python -m pretrain.study",
        description="Variants of a recipe over seeds. Studies: " + ", ".join(study_names()),
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    made: dict[str, Parser] = {}
    for name, text in COMMANDS.items():
        made[name] = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        what = "a study's name, its YAML file, or a folder that has been run"
        made[name].add_argument("study", metavar="STUDY", nargs="?" if name == "list" else None, help=what)
        made[name].add_argument(
            "--out", type=Path, metavar="FOLDER", help="the study's folder (default: runs/NAME)"
        )
    add = made["run"].add_argument
    add("--parallel", type=int, metavar="N", help="runs at a time (default: 1; with --slurm: no limit)")
    add("--slurm", action="store_true", help="submit an array job, a task for each run")
    more = "more options of sbatch, as --sbatch='--gres=gpu:1'"
    add("--sbatch", type=shlex.split, default=[], metavar="OPTIONS", help=more)
    add("--dry_run", action="store_true", help="say what would run, and stop")
    add = made["power"].add_argument
    pilot = "a study's folder with finished runs, to take the spread and the speed from"
    add("--pilot", type=Path, metavar="FOLDER", help=pilot)
    add("--sd", type=float, help="standard deviation of paired differences, in place of a pilot's")
    add("--effect", type=float, help="difference to be found (default: the study's)")
    add("--power", type=float, default=0.8, help="probability to find it (default: 0.8)")
    add("--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    add = made["task"].add_argument
    add("number", metavar="N", help="number of the run, from 0; 'only' in a study of one run")
    add("--ranks", type=int, metavar="N", help="also print how many of so many ranks it can use")
    return parser


COMMANDS = {
    "run": "train what a study still lacks; the same command goes on after a stop",
    "list": "how far each run is; without STUDY: the studies that there are",
    "power": "how many seeds an effect needs, and what the study costs",
    "report": "tables and figures of what is finished, into FOLDER/report",
    "task": "the arguments of one run, for slurm/study.sh",
}


def run_study(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code.

    Raises:
        UserError: bad input.
    """
    options = build_parser().parse_args(arguments)
    if options.study is None:
        say(*_studies())
        return 0
    # Of a large study a task needs one run alone.
    study, folder = _open(options.study, options.out, check_runs=options.command != "task")
    if options.command == "list":
        say(*_states(study, folder))
    elif options.command == "task":
        _task(study, folder, options.number, options.ranks)
    elif options.command == "power":
        _power(study, options)
    elif options.command == "report":
        _report(study, folder)
    else:
        return _run(study, folder, options)
    return 0


def _open(name: str, out: Path | None, check_runs: bool) -> tuple[Study, Path]:
    """The study of a name, a file or a folder, and the folder of its runs; see read_study for
    *check_runs*."""
    path = Path(name)
    if path.is_dir():
        if out is not None and os.path.realpath(out) != os.path.realpath(path):
            raise UserError(
                f"out: {str(out)!r} beside the folder {name!r}; give the study's file with another --out"
            )
        return study_of(path, check_runs), path
    file = find_study(name)
    folder = out or Path("runs") / file.stem
    if not is_folder_name(Path(os.path.realpath(folder)).name):
        raise UserError(
            f"out: {str(folder)!r} is not valid; give a folder whose name does not begin with a dot"
        )
    return read_study(file, folder, check_runs=check_runs), folder


def _run(study: Study, folder: Path, options: argparse.Namespace) -> int:
    from pretrain.run.lock import RunLock
    from pretrain.runtime.hardware import available_cores

    if options.parallel is not None and options.parallel < 1:
        raise UserError(f"parallel: {options.parallel} is not valid; give a positive number")
    if options.sbatch and not options.slurm:
        raise UserError("sbatch: options of sbatch without --slurm; give both or neither")
    if study.untuned:
        code, tuned = _tune(study, folder, options)
        if not tuned:
            return code
        study = parse_study(study.text, study.name, folder)
    while study.next_rung:
        code, done = _halve(study, folder, options)
        if not done:
            return code
        study = parse_study(study.text, study.name, folder)
    check_settings(study, folder)
    todo = unfinished(study, folder)
    say(*_opening(study, folder, todo))
    if not todo:
        say(f"next     {_python('report', folder)}")
        return 0
    lines: list[list[str]] = []
    shares: list[Slot] = []
    if options.slurm:
        lines = sbatch_commands(study, folder, todo, options.parallel, options.sbatch)
        with contextlib.chdir(ROOT):  # where the jobs look for recipes and data
            _check_for_jobs(study, folder)
    else:
        shares = slots(options.parallel or 1, _devices(), available_cores())
        check_runs(study)
    if options.dry_run:
        print("".join(f"would run: {shlex.join(line)}\n" for line in lines), end="")
        return 0
    with contextlib.ExitStack() as stack:
        # No other session may change the files of runs that train.
        stack.callback(RunLock(folder, option="out", parent_option="out").release)
        write_study(study, folder)
        for line in lines:
            print(f"submitted job {submit(line)}: {shlex.join(line)}", flush=True)
        if options.slurm:
            return 0
        scheduler = Scheduler(study, folder, shares)
        failed = scheduler.run()
    left = unfinished(study, folder)
    print(f"runs     {len(study.runs) - len(left)} of {len(study.runs)} finished, {len(failed)} failed")
    for name, reason in failed.items():
        say(f"failed   {name}: {reason} (logs/{name}.log)")
    if left:
        say(f"continue {_python('run', folder)}")
    say(f"next     {_python('report', folder)}")
    if scheduler.stopped is not None:
        return INTERRUPTED if scheduler.stopped == signal.SIGINT else STOPPED
    return SOME_FAILED if failed else 0


def _tune(study: Study, folder: Path, options: argparse.Namespace) -> tuple[int, bool]:
    """Train the pilots that are missing, and choose each variant's value when all have been tried.

    Returns:
        The exit code, and whether the values are chosen.
    """
    say(f"pilots   of {some_names(study.untuned)}: values of one setting")
    code, results = _run_pilots(pilot_of(study, folder), study, folder, options)
    if results is None:
        return code, False
    tried = {name: study.tried[name] for name in study.untuned}
    tuned = choose_all(tried, study.file.pilot_seeds or [], results, study.file.measure in HIGHER_IS_BETTER)
    for name, found in tuned.items():
        edge = ", an edge of the values that were tried" * found.at_edge
        say(f"tuned    {name}: {found.field} {label(found.value)}{edge}")
    if not options.dry_run:
        write_tuned(folder, {**study.tuned, **tuned})
    return 0, not options.dry_run


def _halve(study: Study, folder: Path, options: argparse.Namespace) -> tuple[int, bool]:
    """Train what is missing of the next rung, and drop variants when all its runs have been tried.

    Returns:
        The exit code, and whether the rung is finished.
    """
    rung, halving = study.next_rung, study.file.halving
    assert rung is not None and halving is not None
    say(f"rung     {rung} of {len(halving.rungs)}: {halving.rungs[rung - 1]:.4g} of the steps")
    short = rung_of(study, folder)
    code, results = _run_pilots(short, study, folder, options)
    if results is None:
        return code, False
    found: list[RungResult] = []
    for comparison in short.comparisons:
        names = [full_name((comparison.name, variant)) for variant in comparison.variants]
        baseline = full_name((comparison.name, comparison.baseline or ""))
        own = {name: results.get(name, {}) for name in names}
        found += drop(rung, own, baseline, halving.keep, study.file.measure in HIGHER_IS_BETTER)
    for each in found:
        if not each.kept:
            missed = ", and may be no worse than one that is kept" * each.may_be_missed
            say(f"dropped  {each.variant}{missed}")
    if not options.dry_run:
        write_kept(folder, [*study.rungs, *found])
    return 0, not options.dry_run


def _run_pilots(
    pilot: Study, study: Study, folder: Path, options: argparse.Namespace
) -> tuple[int, dict[str, dict[int, float]] | None]:
    """Train what a study of pilots, in the folder of its name in the study's *folder*, lacks.

    Returns:
        The exit code, and the results by full name and seed; None while a run has not been tried.
    """
    code, own = 0, folder / pilot.name
    if _untried(pilot):
        if not options.dry_run:  # so that the study's folder can be named from now on
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / STUDY_FILE, study.text)
        code = _run(pilot, own, options)
        if options.dry_run or options.slurm or _untried(pilot):
            say(f"then     {_python('run', study.name)} again, when these runs are finished")
            return code, None
    results: dict[str, dict[int, float]] = {}
    for run in load_results(pilot, own):
        value = run.result(study.file.measure, study.file.last_validations)
        if value is not None:
            results.setdefault(run.planned.full_name, {})[run.planned.seed] = value
    return code, results


def _untried(pilot: Study) -> list[PlannedRun]:
    """The runs that have neither finished nor failed."""
    return [run for run in pilot.runs if run_state(pilot, run, run.out)[0] in ("missing", "unfinished")]


def _check_for_jobs(study: Study, folder: Path) -> None:
    """Refuse a study whose files are not found from the working directory, that of a job."""
    try:
        check_runs(parse_study(study.text, study.name, folder))
    except UserError as error:
        raise UserError(f"{error} (jobs look for it from {Path.cwd()}; give an absolute path)") from None


def _opening(study: Study, folder: Path, todo: Sequence[PlannedRun]) -> list[str]:
    variants = f"{len(study.of_first_seed)} variants x {len(study.file.seeds)} seeds"
    return [
        f"study    {study.name}: {study.title}",
        f"runs     {len(study.runs)}: {variants}, in {folder}",
        *(f"design   {each.design.described}" for each in study.comparisons if each.design),
        f"to do    {len(todo)} runs, {sum(planned.flops for planned in todo):.2e} FLOPs",
    ]


def _studies() -> list[str]:
    rows = [("study", "runs", "FLOPs", "sized for", "title")]
    for name in study_names():
        study = read_study(find_study(name))
        pilots = pilot_of(study, study.runs[0].out).runs if study.tried else ()
        runs = [*pilots, *study.runs]
        flops = sum(planned.flops for planned in runs)
        hours, machine = study.file.hours, study.file.machine
        sized = f"{hours:g} h on {machine}" if hours else machine
        rows.append((name, str(len(runs)), f"{flops:.1e}", sized, study.title))
    return aligned(rows, left={0, 3, 4})


def _states(study: Study, folder: Path) -> list[str]:
    check_settings(study, folder)
    rows = [("number", "run", "state", "step")]
    numbers = {name: number for number, name in enumerate(task_names(study, folder))}
    for planned in study.runs:
        state, metrics = run_state(study, planned, folder)
        step = f"{metrics[-1]['step']:,}" if metrics else "0"
        text = f"{state} ({failure(planned, folder)})" if state == "failed" else state
        rows.append((str(numbers[planned.name]), planned.name, text, f"{step}/{planned.run.steps:,}"))
    notes = []
    if study.untuned:
        pilot = pilot_of(study, folder)
        left = f"{len(_untried(pilot))} of {len(pilot.runs)} pilots are left"
        notes.append(f"not tuned yet: {left} ({_python('list', folder / pilot.name)})")
    if rung := study.next_rung:
        short = rung_of(study, folder)
        left = f"{len(_untried(short))} of {len(short.runs)} runs are left"
        notes.append(f"rung {rung}: {left} ({_python('list', folder / short.name)})")
    if unnamed := unnamed_line(unnamed_runs(study, folder)):
        notes.append(unnamed)
    return [*aligned(rows, left={1, 2}), *notes]


def _task(study: Study, folder: Path, number: str, ranks: int | None) -> None:
    """Print ds_config and recipe of a run, a line each, and write its recipe, and the study's files if they
    are not there.

    A failure of an earlier attempt is forgotten: this one begins.
    """
    if study.untuned or study.next_rung:
        what = (
            f"{study.untuned[0]} is not tuned" if study.untuned else f"rung {study.next_rung} is not finished"
        )
        raise UserError(f"study: {what} yet; {_python('run', study.name)}")
    planned = run_of_task(study, folder, number)
    written, config = folder / STUDY_FILE, folder / CONFIGS / f"{planned.name}.yaml"
    there = all(path.is_file() for path in (written, config, folder / TASKS_FILE))
    if not there or written.read_bytes() != study.text.encode("utf-8"):
        check_settings(study, folder, [planned])
        write_study(study, folder, [planned])
    failed_mark(planned, folder).unlink(missing_ok=True)
    print(ds_config_path(study))
    print(config)
    if ranks is not None:
        print(most_ranks(planned.run, ranks))


def _power(study: Study, options: argparse.Namespace) -> None:
    from pretrain.study.power import Question, power_lines
    from pretrain.study.summaries import View

    question = Question(sd=options.sd, effect=options.effect, power=options.power, parallel=options.parallel)
    pilot = None
    if options.pilot is not None:
        planned = study_of(options.pilot)
        results = load_results(planned, options.pilot)
        pilot = View(planned, results, options.pilot, study.file.measure, study.file.last_validations)
    print("\n".join(power_lines(study, question, pilot)))


def _report(study: Study, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"study: {shown(str(folder))} does not exist; run it first: {_python('run', study.name)}"
        )
    from pretrain.study.report.page import terminal_lines, write_report
    from pretrain.study.summaries import view_of

    view = view_of(study, load_results(study, folder), folder)
    written = write_report(view, folder)
    say(*terminal_lines(view))
    say("wrote " + ", ".join(map(str, written)))


def _devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return given or [str(index) for index in range(torch.cuda.device_count())]


def _python(command: str, study: object) -> str:
    return shlex.join(["python", "-m", "pretrain.study", command, str(study)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a run failed, 75 or 130 after a request to stop, else as run_command."""
    codes = [0]

    def command(given: list[str]) -> None:
        codes[0] = run_study(given)

    return run_command(command, arguments) or codes[0]
