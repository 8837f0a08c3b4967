"""lm-eval's scores of a run or an export: ``head-schedules evaluate DIR|runs/NAME --tasks piqa``.

``--follow`` scores each checkpoint of a run that trains in another job.

Several ranks share the work: ``deepspeed --num_accelerators 2 --module pretrain.evaluation …``.
Without internet: ``head-schedules evaluate save --tasks papers --data_dir DIR`` on a machine that has
it, then ``--data_dir DIR`` here.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from model.declared import NonNegativeInt, PositiveInt, declared
from model.errors import UserError, quote
from pretrain.checkpoint.finder import Hold, checkpoint_path, checkpoint_steps, is_run
from pretrain.config.options import parse_options
from pretrain.evaluation.checks import check_data_dir, check_tasks, resolve_tasks
from pretrain.hf.model_folder import check_model
from pretrain.runtime.command import run_command
from pretrain.utils.env_check import check_variables
from pretrain.utils.files import nearest_existing, refuse_other_kind, write_atomically
from pretrain.utils.format import log_line
from pretrain.utils.run_folder import step_of

if TYPE_CHECKING:
    from pretrain.runtime.world import World


@declared()
class EvaluationOptions:
    """The command line."""

    model: str
    """an exported folder, or a run's folder such as runs/NAME"""
    tasks: str = "papers"
    """lm-eval's task names, files of tasks (mine.yaml), or papers: hellaswag, piqa, winogrande, arc_easy,
    blimp, wikitext"""
    include_path: str | None = None
    """a folder with more tasks as lm-eval's YAMLs; code that they name is run"""
    num_fewshot: NonNegativeInt | None = None
    """few-shot examples before each item (default: the task's own number, else none)"""
    data_dir: str | None = None
    """read the tasks' data sets from here instead of the hub"""
    step: NonNegativeInt | None = None
    """which checkpoint of a run (default: the newest valid one)"""
    last: PositiveInt = 1
    """score this many of a run's newest checkpoints, and report the means of their scores, which vary less"""
    limit: PositiveInt | None = None
    """at most this many items of each task, for a first look"""
    batch_tokens: PositiveInt | None = None
    """tokens of a forward pass (default: by the device's memory)"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the computation (default: as exported; for a run float32, on GPUs TF32)"""
    out: str | None = None
    """where to write the results as JSON (default: inside the folder)"""
    follow: bool = False
    """score each new checkpoint of a run that trains elsewhere, until the run ends; the scores go into its
    evaluation.jsonl"""
    follow_timeout: PositiveInt | None = None
    """seconds to wait for a run that no process trains, such as one in a queue (default: 3600)"""


@declared()
class SaveOptions:
    """The command line of ``save``."""

    data_dir: str
    """folder to write"""
    tasks: str = "papers"
    """as for the evaluation"""
    include_path: str | None = None
    """as for the evaluation"""


def run_evaluation(arguments: Sequence[str]) -> None:
    """Score the model, print a table and write the results.

    Raises:
        UserError: bad input, a data set that is missing.
    """
    options = parse_options(
        EvaluationOptions,
        arguments,
        "head-schedules evaluate",
        "Zero-shot scores through lm-eval.",
        positional=["model"],
        epilog="For machines without internet, head-schedules evaluate save --tasks papers "
        "--data_dir DIR saves the tasks' data sets.",
    )
    check_variables("hub")
    _check_last(options)
    if options.follow:
        check_followed(options)
    elif options.follow_timeout is not None:
        raise UserError(
            f"follow_timeout: {options.follow_timeout} is for --follow; leave one out, or give both"
        )
    else:
        check_model(options.model, options.step)
        _check_out(options)
    data_dir = check_data_dir(options.data_dir or None)
    check_tasks(options.tasks, options.include_path)
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    import lm_eval.utils
    import torch

    from pretrain.evaluation.follow import TIMEOUT, follow, settings_of, stop_at_signal
    from pretrain.evaluation.language_model import ZeroShotModel
    from pretrain.evaluation.scores import (
        check_answers,
        drop_subtasks,
        headline,
        load_tasks,
        score,
        task_manager,
    )
    from pretrain.hf.open_model import open_model

    if "SLURM_JOB_ID" in os.environ:  # of slurm/evaluate.sh, ahead of its time limit
        stop_at_signal(options.follow)
    world = _join_ranks()
    # Rank 0 reads lm-eval's files for all.
    manager = world.on_rank_zero(lambda: task_manager(options.tasks, options.include_path))
    tasks = resolve_tasks(options.tasks.split(","), manager.all_tasks)
    if options.dtype is None:
        # Products in TF32 where fp32 is computed on a GPU: scores rank sums of logits, which 10 bits of
        # mantissa settle.
        torch.set_float32_matmul_precision("high")
    # Before the model, so that missing data end it early.
    loaded = world.on_all_ranks(lambda: load_tasks(tasks, manager, data_dir))
    dtype = getattr(torch, options.dtype) if options.dtype else None

    def score_step(step: int | None) -> tuple[ZeroShotModel, int | None, dict[str, Any]]:
        opened = world.on_all_ranks(lambda: open_model(options.model, step, dtype))
        length, batch_tokens = opened.context_length, options.batch_tokens
        check_answers(loaded, length)
        model = ZeroShotModel(opened.logits, opened.tokenizer, length, world, batch_tokens)
        return model, opened.step, score(model, loaded, options.limit, shots=options.num_fewshot)

    if options.follow:
        follow(
            Path(options.model),
            settings_of(options, tasks),
            lambda step: headline(score_step(step)[2]),
            world,
            options.follow_timeout or TIMEOUT,
        )
        return
    holds: list[Hold] = []  # until all are scored
    newest, earlier = options.step, list[int]()
    if options.last > 1 or world.size > 1:  # else open_model looks for the newest, and hashes it once
        newest, earlier = world.on_rank_zero(lambda: _choose_steps(options, holds))
    scored = [headline(score_step(step)[2]) for step in earlier]
    model, step, results = score_step(newest)
    scored.append(headline(results))
    scores = {name: fmean(each[name] for each in scored) for name in scored[-1]}
    if not world.is_main:
        return
    print(lm_eval.utils.make_table({**results, "results": drop_subtasks(results)}))
    if model.truncated:
        too_long = f"{model.truncated:,} texts did not fit the context of {model.max_length}"
        print(log_line("note", f"{too_long} with their answers, and were cut on the left"))
    if earlier:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        print(log_line("means", f"of {len(scored)} checkpoints, the table's and those before it: {shown}"))
    where = "evaluation.json" if step is None else f"evaluation/step_{step:06d}.json"
    settings = settings_of(options, tasks) | {"include_path": options.include_path, "earlier_steps": earlier}
    out = Path(options.out) if options.out else _choose_file(Path(options.model, where), settings)
    theirs = out.with_name(f"{out.stem}.lm_eval.json")
    record = {
        "model": options.model,
        "step": step,
        **settings,
        "scores": scores,
        "results": results["results"],
        "items": results["n-samples"],
        "shots": results["n-shot"],
        "task_versions": results["versions"],
        "versions": {"lm_eval": lm_eval.__version__, "torch": torch.__version__},
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, json.dumps(record, indent=2, default=str) + "\n")
        write_atomically(
            theirs, json.dumps(_to_lm_eval_record(options, results), indent=2, default=str) + "\n"
        )
    except OSError as error:
        raise UserError(f"out: cannot write {out}: {error.strerror or error}") from error
    print(log_line("wrote", f"{out}; as lm-eval writes it: {theirs}"))


def _check_out(options: EvaluationOptions) -> None:
    """Raises UserError: the results could not be written in the end."""
    path = Path(options.out or Path(options.model, "evaluation.json"))
    if not path.name or path.is_dir():
        raise UserError(f"out: {quote(options.out)} is a folder; give a file, such as scores.json")
    folder = nearest_existing(path.parent)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"out: {quote(str(folder))} cannot be written; give another file with --out")


def _check_last(options: EvaluationOptions) -> None:
    """Raises UserError: there are too few checkpoints, or --last does not go with the other flags."""
    if options.last == 1:
        return
    if options.follow or options.step is not None:
        other = "--follow" if options.follow else "--step"
        raise UserError(f"last: {options.last} was given with {other}; leave one of both out")
    steps = checkpoint_steps(Path(options.model)) if is_run(Path(options.model)) else []
    if len(steps) < options.last:
        valid = f"it has {len(steps)} checkpoints" if steps else "give a run's folder"
        raise UserError(f"last: {options.last} is not valid for {options.model!r}; {valid}")


def _choose_steps(options: EvaluationOptions, holds: list[Hold]) -> tuple[int | None, list[int]]:
    """The step to score, None of an exported folder; and those before it whose scores are averaged with it.
    Of a run that trains, the ranks would find several. *holds* keep them from being pruned.

    Raises:
        UserError: no checkpoint is whole, or too few are older than the newest that is.
    """
    folder = Path(options.model)
    if options.step is not None or not is_run(folder):
        return options.step, []
    from pretrain.run.saved import find_checkpoint

    path, hold = find_checkpoint(folder, None, partial(print, file=sys.stderr))
    newest = step_of(path.name)
    earlier = [step for step in checkpoint_steps(folder) if step < newest]
    if len(earlier) < options.last - 1:
        valid = f"{len(earlier)} checkpoints are older than the newest whole one, of step {newest}"
        raise UserError(f"last: {options.last} is not valid for {options.model!r}; {valid}")
    earlier = earlier[len(earlier) - options.last + 1 :]
    holds += [hold, *(Hold(checkpoint_path(folder, step)) for step in earlier)]
    return newest, earlier


def check_followed(options: EvaluationOptions) -> None:
    """Reject a model to follow that is not, and will not become, a run.

    Raises:
        UserError: a folder of another kind, flags that are for one checkpoint.
    """
    for name in ("step", "out"):
        if getattr(options, name) is not None:
            raise UserError(
                f"{name}: {getattr(options, name)} was given, but --follow scores each checkpoint into "
                "evaluation.jsonl; leave one of both out"
            )
    folder = Path(options.model)
    refuse_other_kind(folder, "run", "model")
    if is_run(folder):
        if checkpoint_steps(folder):
            check_model(folder, None)
    elif not folder.parent.is_dir():
        raise UserError(
            f"model: {str(folder.parent)!r} is not a folder; give a run that trains, or will, such as "
            "runs/NAME"
        )


def _choose_file(first: Path, settings: dict[str, Any]) -> Path:
    """The file for a record: *first*, or where that has scores of other settings, its name with a number."""
    path = first
    for number in itertools.count(2):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            break
        if isinstance(held, dict) and {name: held.get(name, "unknown") for name in settings} == settings:
            break
        path = first.with_name(f"{first.stem}-{number}.json")
    return path


def _to_lm_eval_record(options: EvaluationOptions, results: dict[str, Any]) -> dict[str, Any]:
    """The record of lm-eval's own command, for programs that read it."""
    import lm_eval

    config = {
        "model": "head-schedules",
        "model_args": {"pretrained": options.model, "dtype": options.dtype},
        "batch_size": options.batch_tokens,
        "num_fewshot": options.num_fewshot,
        "limit": options.limit,
    }
    return {**results, "config": config, "date": time.time(), "lm_eval_version": lm_eval.__version__}


def run_save(arguments: Sequence[str]) -> None:
    """Save the data sets of tasks.

    Raises:
        UserError: bad input, or a data set that cannot be fetched.
    """
    options = parse_options(SaveOptions, arguments, "head-schedules evaluate save", "Save tasks' data sets.")
    check_variables("hub")
    check_tasks(options.tasks, options.include_path)
    from pretrain.evaluation.scores import save_data_sets, task_manager

    manager = task_manager(options.tasks, options.include_path)
    tasks = resolve_tasks(options.tasks.split(","), manager.all_tasks)
    save_data_sets(tasks, manager, Path(options.data_dir))


def _join_ranks() -> World:
    """Join the launcher's ranks, if there is a launcher."""
    from pretrain.runtime.hardware import detect_device
    from pretrain.runtime.world import single_world, start_world

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return single_world(detect_device())
    from pretrain.engine.patches import prepare_deepspeed

    prepare_deepspeed()
    return start_world(threads=None, deterministic=False)


SUBCOMMANDS = {"save": run_save}


def _run(arguments: list[str]) -> None:
    # The launcher adds --local_rank.
    arguments = [argument for argument in arguments if not argument.startswith("--local_rank")]
    if arguments and (subcommand := SUBCOMMANDS.get(arguments[0])):
        subcommand(arguments[1:])
    else:
        run_evaluation(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(_run, arguments)
