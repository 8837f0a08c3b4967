"""``python -m pretrain.study``: runs studies, plans their size, and reports what they show."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from model.errors import INTERRUPTED, UserError, run_command, shown
from pretrain.config.command_line import CommandParser as Parser
from pretrain.config.run_config import is_folder_name
from pretrain.runtime.signals import STOPPED
from pretrain.study.ranks import most_ranks, rank_lines
from pretrain.study.results import (
    CONFIGS,
    STUDY_FILE,
    TASKS_FILE,
    check_settings,
    failed_mark,
    failure,
    load_results,
    run_state,
    study_of,
    task_names,
    unfinished,
    unnamed_line,
    unnamed_runs,
)
from pretrain.study.scheduler import (
    ROOT,
    Outcome,
    Scheduler,
    check_runs,
    ds_config_path,
    slots,
    write_study,
)
from pretrain.study.slurm import run_of_task, sbatch_commands, submit
from pretrain.study.study_file import Study, find_study, parse_study, read_study, study_names
from pretrain.utils.tables import aligned

SOME_FAILED = 1


def build_parser() -> Parser:
    """Build the parser of the command line."""
    parser = Parser(
        prog="python -m pretrain.study",
        description="Variants of a recipe over seeds. Studies: " + ", ".join(study_names()),
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    run = _command(commands, "run", "train what a study still lacks; the same command goes on after a stop")
    run.add_argument(
        "--parallel", type=int, metavar="N", help="runs at a time (default: 1; with --slurm: no limit)"
    )
    run.add_argument("--slurm", action="store_true", help="submit an array job, a task for each run")
    run.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="more options of sbatch, as --sbatch='--gres=gpu:1'"
    )
    run.add_argument("--dry_run", action="store_true", help="say what would run, and stop")
    _command(
        commands, "list", "how far each run is; without STUDY: the studies that there are", optional=True
    )
    power = _command(commands, "power", "how many seeds an effect needs, and what the study costs")
    power.add_argument(
        "--pilot",
        type=Path,
        metavar="FOLDER",
        help="a study's folder with finished runs, to take the spread and the speed from",
    )
    power.add_argument(
        "--sd", type=float, help="standard deviation of paired differences, in place of a pilot's"
    )
    power.add_argument("--effect", type=float, help="difference to be found (default: the study's)")
    power.add_argument("--power", type=float, default=0.8, help="probability to find it (default: 0.8)")
    power.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    _command(commands, "report", "tables and figures of what is finished, into FOLDER/report")
    task = _command(commands, "task", "the arguments of one run, for slurm/study.sh")
    task.add_argument("number", metavar="N", help="number of the run, from 0; 'only' in a study of one run")
    task.add_argument(
        "--ranks", type=int, metavar="N", help="also print how many of so many ranks it can use"
    )
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, text: str, optional: bool = False
) -> Parser:
    parser: Parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    what = "a study's name, its YAML file, or a folder that has been run"
    if optional:
        parser.add_argument("study", metavar="STUDY", nargs="?", help=what)
    else:
        parser.add_argument("study", metavar="STUDY", help=what)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the study's folder (default: runs/NAME)")
    return parser


def run_study(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code.

    Raises:
        UserError: bad input.
    """
    options = build_parser().parse_args(arguments)
    if options.study is None:
        print("\n".join(_studies()))
        return 0
    study, folder = _open(options.study, options.out)
    if options.command == "list":
        print("\n".join(_states(study, folder)))
    elif options.command == "task":
        _task(study, folder, options.number, options.ranks)
    elif options.command == "power":
        _power(study, options)
    elif options.command == "report":
        _report(study, folder)
    else:
        return _run(study, folder, options)
    return 0


def _open(name: str, out: Path | None) -> tuple[Study, Path]:
    """The study of a name, a file or a folder, and the folder of its runs."""
    path = Path(name)
    if path.is_dir():
        if out is not None and out.resolve() != path.resolve():
            raise UserError(
                f"out: {str(out)!r} beside the folder {name!r}; give the study's file with another --out"
            )
        return study_of(path), path
    file = find_study(name)
    folder = out or Path("runs") / file.stem
    if not is_folder_name(folder.resolve().name):
        raise UserError(
            f"out: {str(folder)!r} is not valid; give a folder whose name does not begin with a dot"
        )
    return read_study(file, folder), folder


def _run(study: Study, folder: Path, options: argparse.Namespace) -> int:
    from pretrain.runtime.hardware import available_cores
    from pretrain.study.pairing import pairing_lines

    if options.parallel is not None and options.parallel < 1:
        raise UserError(f"parallel: {options.parallel} is not valid; give a positive number")
    if options.sbatch and not options.slurm:
        raise UserError("sbatch: options of sbatch without --slurm; give both or neither")
    check_settings(study, folder)
    todo = unfinished(study, folder)
    print("\n".join(_opening(study, folder, todo, pairing_lines(study))), flush=True)
    if not todo:
        print(f"next     {_python('report', folder)}")
        return 0
    if options.slurm:
        lines = sbatch_commands(study, folder, todo, options.parallel, _words(options.sbatch))
        with contextlib.chdir(ROOT):  # where the jobs look for recipes and data
            check_runs(_as_jobs_read_it(study, folder))
        if options.dry_run:
            print("\n".join(f"would run: {shlex.join(line)}" for line in lines))
            return 0
        with _locked(folder):
            write_study(study, folder)
            for line in lines:
                print(f"submitted job {submit(line)}: {shlex.join(line)}", flush=True)
        return 0
    shares = slots(options.parallel or 1, _devices(), available_cores())
    for note in rank_lines([study.runs[number] for number in todo], len(shares[0].devices)):
        print(note, flush=True)
    check_runs(study)
    if options.dry_run:
        return 0
    with _locked(folder):
        write_study(study, folder)
        scheduler = Scheduler(study, folder, shares)
        outcome = scheduler.run()
    print("\n".join(_closing(study, folder, outcome)), flush=True)
    if scheduler.stopped is not None:
        return INTERRUPTED if scheduler.stopped == signal.SIGINT else STOPPED
    return SOME_FAILED if outcome.failed else 0


def _as_jobs_read_it(study: Study, folder: Path) -> Study:
    """The study as read in the working directory, that of a job."""
    try:
        return parse_study(study.text, study.name, folder)
    except UserError as error:
        raise UserError(f"{error} (jobs look for it from {Path.cwd()}; give an absolute path)") from None


def _words(options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise UserError(f"sbatch: {options!r} is not valid ({error}); quote as in a shell") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a study's folder for this command: no other session may change the files of runs that train."""
    from pretrain.run.lock import RunLock

    lock = RunLock(folder, option="out", parent_option="out")
    try:
        yield
    finally:
        lock.release()


def _opening(study: Study, folder: Path, todo: Sequence[int], pairs: Sequence[str]) -> list[str]:
    flops = sum(study.runs[number].flops for number in todo)
    sized = f"; sized for {study.hours:g} h on {study.machine}" if study.hours and study.machine else ""
    return [
        f"study    {study.name}: {study.title}",
        f"runs     {len(study.runs)}: {sum(len(c.variants) for c in study.comparisons)} variants x "
        f"{len(study.seeds)} seeds, in {folder}{sized}",
        *(f"paired   {line}" for line in pairs),
        f"to do    {len(todo)} runs, {flops:.2e} FLOPs",
    ]


def _closing(study: Study, folder: Path, outcome: Outcome) -> list[str]:
    lines = [f"runs     {outcome.finished} of {len(study.runs)} finished, {len(outcome.failed)} failed"]
    lines += [f"failed   {name}: {reason} (logs/{name}.log)" for name, reason in outcome.failed.items()]
    if outcome.left or outcome.failed:
        lines.append(f"continue {_python('run', folder)}")
    return [*lines, f"next     {_python('report', folder)}"]


def _studies() -> list[str]:
    rows = [("study", "runs", "FLOPs", "sized for", "title")]
    for name in study_names():
        study = read_study(find_study(name))
        flops = sum(planned.flops for planned in study.runs)
        sized = f"{study.hours:g} h on {study.machine}" if study.hours else study.machine
        rows.append((name, str(len(study.runs)), f"{flops:.1e}", sized, study.title))
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
    beside = unnamed_runs(study, folder)
    return aligned(rows, left={1, 2}) + [unnamed_line(beside)] * bool(beside)


def _task(study: Study, folder: Path, number: str, ranks: int | None) -> None:
    """Print ds_config and recipe of a run, a line each, and write the study's files if they are not there.

    A failure of an earlier attempt is forgotten: this one begins.
    """
    planned = run_of_task(study, folder, number)
    written, tasks = folder / STUDY_FILE, folder / TASKS_FILE
    if not tasks.is_file() or not written.is_file() or written.read_bytes() != study.text.encode("utf-8"):
        check_settings(study, folder)
        write_study(study, folder)
    failed_mark(planned, folder).unlink(missing_ok=True)
    print(ds_config_path(study))
    print(folder / CONFIGS / f"{planned.name}.yaml")
    if ranks is not None:
        print(most_ranks(planned.run, ranks))


def _power(study: Study, options: argparse.Namespace) -> None:
    from pretrain.study.power import Pilot, Question, power_lines

    question = Question(sd=options.sd, effect=options.effect, power=options.power, parallel=options.parallel)
    pilot = None
    if options.pilot is not None:
        planned = study_of(options.pilot)
        pilot = Pilot(options.pilot, planned, load_results(planned, options.pilot))
    print("\n".join(power_lines(study, question, pilot)))


def _report(study: Study, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"study: {shown(str(folder))} does not exist; run it first: {_python('run', study.name)}"
        )
    from pretrain.study.report.page import terminal_lines, view_of, write_report

    view = view_of(study, load_results(study, folder), folder)
    written = write_report(view, folder)
    print("\n".join(terminal_lines(view)))
    print("wrote " + ", ".join(map(str, written)))


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
