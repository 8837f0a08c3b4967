"""``--plot_lr FILE``: shows every optimizer group's learning rate as a table and a picture, before a run
starts."""

from __future__ import annotations

import math
from pathlib import Path

from model.parameters import parameter_specs
from pretrain.config.run_config import RunConfig
from pretrain.optim.groups import Group, GroupRates, run_groups
from pretrain.plan.corpora import build_model
from pretrain.utils.format import align_columns
from pretrain.utils.plotting import curve_colors, save_figure


def plot_learning_rates(run: RunConfig, out: Path) -> list[str]:
    """Draw the learning rate of every group at every step.

    A rule that is released by maturity is drawn as if it were released at the latest step, and dotted as if
    at the first step that its hold allows: the real curve lies between.

    Returns:
        Lines to print: a table of the groups, and what was written.

    Raises:
        UserError: the rules do not fit the model or the run, or the picture cannot be written.
    """
    model = build_model(run)
    groups = run_groups(run, model)
    rates = GroupRates(groups, run)
    sizes = {name: math.prod(spec.shape) for name, spec in parameter_specs(model).items()}
    _draw(run, groups, rates, out)
    header = ("group", "parameters", "tensors", "first step", "highest", "last step", "slow-down ends")
    rows = [header, *(_row(group, rates, sizes, run.steps) for group in groups)]
    measured = (
        f"llr.apply {run.llr.apply}: while training, measured factors of {run.llr.low:g} to "
        f"{run.llr.high:g} multiply the rates of matrices"
    )
    return [
        *align_columns(rows, left=(0, 6)),
        *([measured] if run.llr.active else []),
        f"wrote {out}: learning rate of each group over {run.steps:,} steps",
    ]


def _row(group: Group, rates: GroupRates, sizes: dict[str, int], steps: int) -> tuple[str, ...]:
    curve = _curve(group, rates, steps, None)
    end = "-"
    if group.rule is not None:
        schedule = rates.rules[group.rule.name]
        if schedule.latest is not None:
            end = f"by maturity, step {schedule.hold or 0} to {schedule.latest}, ramp {schedule.ramp}"
        elif schedule.hold is not None:
            end = f"step {schedule.hold}, ramp {schedule.ramp}"
        else:
            end = "never"
    return (
        group.name,
        f"{sum(sizes[name] for name in group.parameters):,}",
        str(len(group.parameters)),
        f"{curve[0]:.3e}",
        f"{max(curve):.3e}",
        f"{curve[-1]:.3e}",
        end,
    )


def _curve(group: Group, rates: GroupRates, steps: int, released: int | None) -> list[float]:
    releases = {group.rule.name: released} if group.rule is not None and released is not None else {}
    return [rates.compute(group.name, step, releases)[0] for step in range(steps)]


def _draw(run: RunConfig, groups: list[Group], rates: GroupRates, out: Path) -> None:
    # Groups that differ only in weight decay have the same curve, which is drawn once.
    curves: dict[tuple[float, ...], list[Group]] = {}
    for group in groups:
        curves.setdefault(tuple(_curve(group, rates, run.steps, None)), []).append(group)
    with save_figure(out, "--plot_lr", size=(9, 4.5), dpi=130) as (figure, axis):
        for color, (curve, members) in zip(curve_colors(len(curves)), curves.items(), strict=True):
            axis.plot(range(run.steps), curve, color=color, label=", ".join(group.name for group in members))
            rule = members[0].rule
            if rule is not None and rule.release == "maturity":
                earliest = _curve(members[0], rates, run.steps, rates.rules[rule.name].hold or 0)
                axis.plot(range(run.steps), earliest, color=color, linestyle=":")
        axis.set(xlabel="step", ylabel="learning rate", title=f"{run.run_name}: {run.schedule.kind}")
        axis.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
