"""``head-schedules study``: runs studies, plans their size, and reports what they show."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.errors import UserError, quote
from pretrain.config.command_line import CommandParser as Parser
from pretrain.config.run_config import is_folder_name
from pretrain.config.sources import FLAGS, TEXTS, find_ds_config
from pretrain.engine.batch import most_ranks
from pretrain.runtime.command import run_command
from pretrain.study import results
from pretrain.study.file import find_study, schema, study_names
from pretrain.study.planned import Study
from pretrain.study.planning import build_pilot, list_parts, read_study
from pretrain.study.results import check_settings, failed_mark, list_unfinished, load_results, load_study
from pretrain.study.running.run import run_study
from pretrain.study.running.scheduler import write_study
from pretrain.study.running.slurm import run_of_task
from pretrain.utils.files import refuse_other_kind
from pretrain.utils.format import align_columns, print_lines
from pretrain.utils.parsing import parse_yaml

SETTING = "settings."
"""Begins the flags that replace settings of a study."""


def build_parser() -> Parser:
    """Build the parser of the command line."""
    parser = Parser(
        prog="head-schedules study",
        description="Variants of a recipe over seeds. Studies: " + ", ".join(study_names()),
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    made: dict[str, Parser] = {}
    for name, text in COMMANDS.items():
        made[name] = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == "schema":
            continue
        what = "a study's name, its YAML file, a folder that has been run, or a recorded file"
        made[name].add_argument("study", metavar="STUDY", nargs="?" if name == "list" else None, help=what)
        made[name].add_argument(
            "--out", type=Path, metavar="FOLDER", help="the study's folder (default: runs/NAME)"
        )
        for field in FLAGS:
            made[name].add_argument(f"--{SETTING}{field}", metavar="VALUE", help=argparse.SUPPRESS)
        made[name].epilog = "--settings.FIELD VALUE replaces a setting of all runs, as --settings.steps 100."
    add = made["run"].add_argument
    add("--parallel", type=int, metavar="N", help="runs at a time (default: 1; with --slurm: no limit)")
    add("--slurm", action="store_true", help="submit an array job, a task for each run")
    more = "more options of sbatch, as --sbatch='--gres=gpu:1'"
    add("--sbatch", type=shlex.split, default=[], metavar="OPTIONS", help=more)
    add("--dry_run", action="store_true", help="print what would run, and stop")
    add = made["power"].add_argument
    pilot = "a study's folder with finished runs, to take the spread and the speed from"
    add("--pilot", type=Path, metavar="FOLDER", help=pilot)
    add("--sd", type=float, help="standard deviation of paired differences, in place of a pilot's")
    add("--effect", type=float, help="difference to be found (default: the study's)")
    add("--power", type=float, default=0.8, help="probability to find it (default: 0.8)")
    to = "the file (default: results/NAME.json, or the recorded file itself)"
    made["record"].add_argument("--to", type=Path, metavar="FILE", help=to)
    add = made["task"].add_argument
    add("number", metavar="N", help="number of the run, from 0; 'only' in a study of one run")
    add("--ranks", type=int, metavar="N", help="also print how many of N ranks it can use")
    return parser


COMMANDS = {
    "run": "train what a study still lacks; the same command resumes after a stop",
    "list": "how far each run is; without STUDY: the studies included",
    "power": "how many pairs an effect needs, and what the study costs",
    "report": "tables and pictures of the finished runs, into FOLDER/report",
    "record": "settings, versions and losses of all runs, as one small file",
    "task": "the arguments of one run, for slurm/study.sh",
    "schema": "the JSON schema of a study file, for editors",
}


def dispatch(arguments: Sequence[str]) -> int:
    """Do what the command line asks for; returns the exit code.

    Raises:
        UserError: bad input.
    """
    options = build_parser().parse_args(arguments)
    if options.command == "schema":
        print(json.dumps(schema(), indent=1, ensure_ascii=False))
        return 0
    if options.study is None:
        print_lines(*_studies())
        return 0
    # Of a large study a task needs one run alone.
    study = open_study(options.study, options.out, _settings(options), options.command != "task")
    if options.command == "list":
        print_lines(*_states(study))
    elif options.command == "task":
        _task(study, options.number, options.ranks)
    elif options.command == "power":
        _power(study, options)
    elif options.command == "report":
        _report(study)
    elif options.command == "record":
        from pretrain.study.archive import write_archive

        path = options.to or Path(study.source if study.recorded else f"results/{study.name}.json")
        write_archive(study, path)
        print_lines(f"wrote {path}")
    else:
        return run_study(study, options.parallel, options.slurm, options.sbatch, options.dry_run)
    return 0


def open_study(
    name: str, out: Path | None = None, settings: Mapping[str, Any] | None = None, check_runs: bool = True
) -> Study:
    """The study of a name, a file, an archive (a file that ends with .json) or a folder.

    Args:
        out: the folder of its runs; of a name or a file ``runs/NAME`` by default.
        settings: replace those of the file.
        check_runs: as for parse_study.

    Raises:
        UserError: bad input.
    """
    path = Path(name)
    if path.suffix == ".json":
        from pretrain.study.archive import read_archive

        if settings:
            valid = "a recorded study has its own; take the study's name, or leave this out"
            raise UserError(f"{SETTING}{next(iter(settings))}: {valid}")
        return read_archive(path, out)
    if path.is_dir():
        if out is not None and os.path.realpath(out) != os.path.realpath(path):
            valid = "give one, or the study's file with another out"
            raise UserError(f"out: {str(out)!r} and the folder {name!r}: {valid}")
        return load_study(path, check_runs, settings)
    file = find_study(name)
    folder = out or Path("runs") / file.stem
    if not is_folder_name(Path(os.path.realpath(folder)).name):
        valid = "give a folder whose name does not begin with a dot"
        raise UserError(f"out: {str(folder)!r} is not valid; {valid}")
    return read_study(file, folder, source=name, settings=settings, check_runs=check_runs)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags replace."""
    found: dict[str, Any] = {}
    for field in FLAGS:
        if (text := getattr(options, f"{SETTING}{field}")) is not None:
            value = text if field in TEXTS else parse_yaml(text, f"{SETTING}{field}")
            found[field] = None if text == "null" and TEXTS.get(field) else value
    return found


def _studies() -> list[str]:
    rows = [("study", "runs", "FLOPs", "sized for", "title")]
    for name in study_names():
        study = read_study(find_study(name))
        runs = [each for part in list_parts(study) for each in part.runs]
        hours, machine = study.file.hours, study.file.machine
        sized = f"{hours:g} h on {machine}" if hours else machine
        rows.append((name, str(len(runs)), f"{sum(each.flops for each in runs):.1e}", sized, study.title))
    return align_columns(rows, left={0, 3, 4})


def _states(study: Study) -> list[str]:
    check_settings(study)
    rows = [("number", "run", "state", "step")]
    numbers = {name: number for number, name in enumerate(results.task_names(study))}
    for planned in study.runs:
        state, metrics = results.run_state(study, planned)
        step = f"{metrics[-1]['step'] if metrics else 0:,}/{planned.run.steps:,}"
        reason = results.failure(study, planned)
        text = f"{state} ({reason})" if state == "failed" and reason else state
        rows.append((str(numbers[planned.name]), planned.name, text, step))
    notes = []
    if study.untuned:
        pilot = build_pilot(study)
        notes.append(f"not tuned yet: {len(list_unfinished(pilot))} of {len(pilot.runs)} pilots are left")
    unnamed = results.describe_unnamed(study)
    return [*align_columns(rows, left={1, 2}), *notes, *([unnamed] if unnamed else [])]


def _task(study: Study, number: str, ranks: int | None) -> None:
    """Print ds_config and recipe of a run, a line each, and write its recipe and the study's files.

    A failure of an earlier attempt is forgotten: this one begins.
    """
    if study.untuned:
        raise UserError(f"study: {study.untuned[0]} is not tuned yet; {study.command('run')}")
    refuse_other_kind(study.folder, "study", "out")
    planned = run_of_task(study, number)
    check_settings(study, [planned])
    write_study(study, [planned])
    failed_mark(planned).unlink(missing_ok=True)
    print(find_ds_config(study.file.ds_config))
    print(study.folder / results.CONFIGS / f"{planned.name}.yaml")
    if ranks is not None:
        print(most_ranks(planned.run, ranks))


def _power(study: Study, options: argparse.Namespace) -> None:
    from pretrain.study.power import Question, power_lines
    from pretrain.study.summaries import build_view

    question = Question(sd=options.sd, effect=options.effect, power=options.power)
    pilot = None
    if options.pilot is not None:
        planned, asked = open_study(str(options.pilot)), study.file
        file = replace(planned.file, measure=asked.measure, last_validations=asked.last_validations)
        planned = replace(planned, file=file)
        pilot = build_view(planned, load_results(planned))
        if pilot.measure != asked.measure:
            valid = f"give measure: {pilot.measure}, and an effect in it, or another pilot"
            raise UserError(f"pilot: its tokenizers differ, so its runs compare by {pilot.measure}; {valid}")
    print("\n".join(power_lines(study, question, pilot)))


def _report(study: Study) -> None:
    refuse_other_kind(study.folder, "study", "out")
    if study.recorded is None and not study.folder.is_dir():
        first = f"run it first: {study.command('run')}"
        raise UserError(f"study: {quote(str(study.folder))} does not exist; {first}")
    from pretrain.study.report.page import terminal_lines, write_report
    from pretrain.study.summaries import build_view

    view = build_view(study, load_results(study))
    written = write_report(view)
    print_lines(*terminal_lines(view))
    print_lines("wrote " + ", ".join(map(str, written)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a run failed, 75 or 130 after a request to stop, else as run_command."""
    codes = [0]

    def command(given: list[str]) -> None:
        codes[0] = dispatch(given)

    return run_command(command, arguments) or codes[0]
