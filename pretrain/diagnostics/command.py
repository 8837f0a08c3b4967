"""``head-schedules diagnose runs/A runs/B … [--data DATA] [--out DIR]``: measure runs, compare and draw them.

Runs whose names differ in the seed only (``NAME-s1``, ``NAME-s2``) are repetitions of one group. Differences
are those of each group to the baseline (the first, or that of the study), run by run with the same seed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_steps, require_steps
from pretrain.config.command_line import CommandParser
from pretrain.runtime.command import run_command
from pretrain.utils.env_check import check_installed
from pretrain.utils.files import detect_kinds, write_atomically
from pretrain.utils.format import print_lines
from pretrain.utils.parsing import parse_yaml, read_text


def build_parser() -> CommandParser:
    """Build the parser of the command line."""
    parser = CommandParser(
        prog="head-schedules diagnose",
        description="Attention, residual writes and displacement of weights of finished runs, by layer.",
        epilog="Runs whose names differ in the seed only (NAME-s1, NAME-s2) are repetitions of one group.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs or of a study")
    add("--data", metavar="DATA", help="corpora to measure on (default: each run's own)")
    add("--out", type=Path, metavar="DIR", help="where to write (default: plots/ of the first folder)")
    add("--sequences", type=int, default=32, metavar="N", help="held-out windows (default: 32)")
    add("--steps", default="last", help="checkpoints: last (default), all, or steps such as 100,200")
    add(
        "--baseline",
        metavar="GROUP",
        help="what differences are taken from (default: the study's, or the first)",
    )
    return parser


def list_runs(folder: Path) -> tuple[list[Path], list[str]]:
    """The runs of a folder: itself, or those of a study that have a checkpoint, in the study's order; and the
    study's baselines.

    Raises:
        UserError: no run has a checkpoint.
    """
    if not folder.is_dir() or "study" not in detect_kinds(folder):
        require_steps(folder)
        return [folder], []
    # A line for each run, as the study wrote them.
    names = read_text(folder / "tasks.txt", "study").split() if (folder / "tasks.txt").exists() else []
    runs = [folder / name for name in names if checkpoint_steps(folder / name)]
    if not runs:
        raise UserError(
            f"run: no run of the study {str(folder)!r} has a checkpoint yet; train it: head-schedules study "
            f"run {folder}"
        )
    if left := len(names) - len(runs):
        print_lines(f"warning: {left} of the study's {len(names)} runs have no checkpoint", file=sys.stderr)
    keys = parse_yaml(read_text(folder / "study.yaml", "study"), f"study: {folder / 'study.yaml'}")
    baseline = keys.get("baseline") if isinstance(keys, dict) else None
    names = baseline if isinstance(baseline, list) else [baseline] if baseline else []
    return runs, [str(name) for name in names]


def run_diagnostics(arguments: Sequence[str]) -> None:
    """Measure, compare and draw the runs of the command line.

    Raises:
        UserError: bad input, or a run that cannot be read.
    """
    options = build_parser().parse_args(arguments)
    if options.sequences < 1:
        raise UserError(f"sequences: {options.sequences} is not valid; give a positive number")
    listed = [list_runs(folder) for folder in options.runs]
    folders = [run for runs, _ in listed for run in runs]
    # Imported here: these load torch and DeepSpeed, and a mistyped flag should be answered at once.
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    from pretrain.config.run_config import split_run_name
    from pretrain.diagnostics.comparison import by_group, describe_depths, find_baselines, table
    from pretrain.diagnostics.figures import draw_all
    from pretrain.diagnostics.measure import measure_run
    from pretrain.plots.differences import run_differences

    check_installed("matplotlib")  # it draws when all is measured
    names = [Path(os.path.realpath(folder)).name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"runs: one of {', '.join(names)} was given twice; give runs of different names")
    known = list(dict.fromkeys(split_run_name(name)[0] for name in names))
    if options.baseline not in (None, *known):
        groups_given = ", ".join(known)
        raise UserError(
            f"baseline: no run of a group {options.baseline!r} was given; groups are {groups_given}"
        )
    names = [] if options.baseline else [name for _, baselines in listed for name in baselines]
    baselines = find_baselines(known, names)
    if names and not baselines:
        others = f"no run measured is of the study's baseline {', '.join(names)}"
        others += f", and differences are from {known[0]}"
        print_lines(f"warning: {others}; --baseline NAME chooses another", file=sys.stderr)
    baselines = baselines or dict.fromkeys(known, options.baseline or known[0])
    measured = [measure_run(run, options.data, options.sequences, options.steps) for run in folders]
    groups = by_group(measured)
    differences = run_differences(folders, [run.last["step"] for run in measured])
    notes = list(differences.lines)
    if differences.data and options.data is None:
        same = "" if differences.tokenizers else "; --data DATA measures all on the same"
        notes.append(f"each run was measured on its own held-out text{same}")
    if len(groups) > 1 and (depths := describe_depths(groups)):
        notes.append(depths)
    for note in notes:
        print_lines(f"warning: {note}", file=sys.stderr)
    out = options.out or options.runs[0] / "plots"
    written = draw_all(
        groups, baselines, out, notes, loss="val_bpb" if differences.tokenizers else "val_loss"
    )
    path = out / "diagnostics.json"
    write_atomically(path, json.dumps({run.name: run.last for run in measured}, indent=1) + "\n")
    print_lines(*table(groups))
    print_lines("wrote " + ", ".join(str(file) for file in [*written, path]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_diagnostics, arguments)
