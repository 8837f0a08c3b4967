"""``head-schedules study run``: pilots first where a study has them, then its runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Sequence

from model.errors import UserError
from pretrain.config.sources import ROOT
from pretrain.run.folder import RunLock
from pretrain.runtime.exit import INTERRUPTED
from pretrain.runtime.hardware import available_cores
from pretrain.runtime.signals import STOPPED
from pretrain.study.planned import STUDY_FILE, Study
from pretrain.study.planning import build_pilot, list_parts, parse_study, reread
from pretrain.study.register import register
from pretrain.study.results import check_settings, list_unfinished, load_results
from pretrain.study.running.scheduler import Scheduler, check_runs, slots, write_study
from pretrain.study.running.slurm import sbatch_commands, submit
from pretrain.study.settings import label
from pretrain.study.summaries import View
from pretrain.study.tuning import choose_all, write_tuned
from pretrain.utils.files import refuse_other_kind, write_atomically
from pretrain.utils.format import count_of, print_lines, shorten_names


def run_study(
    study: Study,
    parallel: int | None = None,
    slurm: bool = False,
    sbatch: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Train what a study lacks, pilots first, or submit it; returns the exit code.

    Args:
        parallel: runs at a time; None: one here, no limit with SLURM.
        sbatch: more options of sbatch.

    Raises:
        UserError: bad input.
    """
    if parallel is not None and parallel < 1:
        raise UserError(f"parallel: {parallel} is not valid; give a positive number")
    if sbatch and not slurm:
        raise UserError("sbatch: options of sbatch without --slurm; give both or neither")
    refuse_other_kind(study.folder, "study", "out")
    options = ["--parallel", str(parallel)] if parallel else []
    options += ["--slurm", *(f"--sbatch={each}" for each in sbatch)] if slurm else []
    if study.untuned:
        print_lines(f"pilots   of {shorten_names(study.untuned)}: values of one setting")
        pilot = build_pilot(study)
        if list_unfinished(pilot):
            if not dry_run:  # so that the study's folder can be named from now on
                study.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(study.folder / STUDY_FILE, study.text)
                register(study)
            code = run_study(pilot, parallel, slurm, sbatch, dry_run)
            if dry_run or slurm or code in (INTERRUPTED, STOPPED) or list_unfinished(pilot):
                what = "the study's own runs" if dry_run else f"{study.command('run', *options)} again"
                print_lines(f"then     {what}, when these runs are finished")
                return code
        if _choose(study, pilot, dry_run) or dry_run:
            return int(not dry_run)
        study = reread(study)
    for part in list_parts(study):
        check_settings(part)
    todo = list_unfinished(study)
    print_lines(f"study    {study.name}: {study.title}")
    counts = f"{count_of(len(study.variants), 'variant')} x {count_of(len(study.file.seeds), 'seed')}"
    print_lines(f"runs     {len(study.runs)}: {counts}, in {study.folder}")
    print_lines(*([f"design   {study.design.described}"] if study.design else []))
    print_lines(f"to do    {count_of(len(todo), 'run')}, {sum(planned.flops for planned in todo):.2e} FLOPs")
    if not todo:
        if (study.folder / STUDY_FILE).is_file() and not dry_run:
            write_study(study)  # what a file may still change, such as its status
        print_lines(_describe_next(study, options))
        return 0
    lines = sbatch_commands(study, todo, parallel, sbatch) if slurm else []
    shares = [] if slurm else slots(parallel or 1, _devices(), available_cores())
    (_check_for_jobs if slurm else check_runs)(study)
    if dry_run:
        print("".join(f"would run: {shlex.join(line)}\n" for line in lines), end="")
        return 0
    with contextlib.ExitStack() as stack:
        # No other session may change the files of runs that train.
        stack.callback(RunLock(study.folder, option="out", parent_option="out").release)
        write_study(study)
        for line in lines:
            print(f"submitted job {submit(line)}: {shlex.join(line)}", flush=True)
        if slurm:
            return 0
        scheduler = Scheduler(study, shares)
        failed = scheduler.run()
    left = list_unfinished(study)
    print(f"runs     {len(study.runs) - len(left)} of {len(study.runs)} finished, {len(failed)} failed")
    for name, reason in failed.items():
        print_lines(f"failed   {name}: {reason} (logs/{name}.log)")
    if left:
        print_lines(f"continue {study.command('run', *options)}")
    print_lines(_describe_next(study, options))
    if scheduler.stopped is not None:
        return INTERRUPTED if scheduler.stopped == signal.SIGINT else STOPPED
    return 1 if failed else 0


def _describe_next(study: Study, options: Sequence[str]) -> str:
    """The command after the study's last run; after pilots, that for their study."""
    return f"next     {study.command('run', *options) if study.pilots_of else study.command('report')}"


def _choose(study: Study, pilot: Study, dry_run: bool) -> bool:
    """Choose each variant's value from the pilots that are finished, and write it down; whether one of them
    is an edge of the values that were tried, so that a better one may lie outside."""
    pilots = load_results(pilot)
    view = View(pilot, pilots, study.file.measure, study.file.last_validations)
    results = {each.variant: each.values for each in view.summaries}
    names = {study.variants[name].folder: name for name in study.untuned}
    tried = {folder: study.tried[name] for folder, name in names.items()}
    chosen = choose_all(tried, study.file.pilot_seeds or [], results, view.better == "higher")
    tuned = {names[folder]: each for folder, each in chosen.items()}
    for pilot_run in pilots:
        if pilot_run.state == "failed":
            named = f"{pilot_run.planned.name} failed"
            print_lines(f"note     {named}, and its value does not count: {pilot_run.failure}")
    for name, each in tuned.items():
        edge = "; none beyond it was tried: add one to tune, or run again to use it" if each.at_edge else ""
        print_lines(f"tuned    {name}: {each.field} {label(each.value)}{edge}")
    if not dry_run:
        write_tuned(study.folder, {**study.tuned, **tuned})
    return any(each.at_edge for each in tuned.values())


def _check_for_jobs(study: Study) -> None:
    """Reject a study whose ds_config or data are not found from where jobs look for them."""
    try:
        with contextlib.chdir(ROOT):
            check_runs(parse_study(study.text, study.name, study.folder, pilots=study.pilots))
    except UserError as error:
        raise UserError(f"{error} (jobs look for it from {ROOT}; give an absolute path)") from None


def _devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if not torch.cuda.is_available():
        return []
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return given or [str(index) for index in range(torch.cuda.device_count())]
