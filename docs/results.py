"""Keeps docs/results.md, the pages of the recorded studies, the README and the landing page
in step with the records in results/.

    make figures                       # recomputes every number of the pages, and draws their pictures
    python docs/results.py --check     # lists the numbers that differ, and changes nothing

A number of a page is followed by a comment that says where it comes from, ``<!--STUDY VALUE NAME-->``, such
as ``<!--direction-small difference ascending - descending-->``; VALUES lists what can be asked. A picture
``pictures/STUDY-KIND.svg`` is drawn from the study's results with its text in the page as heading; the kinds
are those of a study's report, and regret (docs/regret.py).
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import linear_regression, mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.regret import draw_regret  # noqa: E402
from model.errors import UserError  # noqa: E402
from pretrain.study.archive import read_archive  # noqa: E402
from pretrain.study.formulas import read_contrasts  # noqa: E402
from pretrain.study.report.pictures import DRAWN  # noqa: E402
from pretrain.study.results import load_results  # noqa: E402
from pretrain.study.statistics.paired import Estimate  # noqa: E402
from pretrain.study.summaries import Contrasted, View, build_view  # noqa: E402
from pretrain.utils.format import interval_text  # noqa: E402

RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", ROOT / "docs/index.md", ROOT / "docs/results.md", *sorted(RESULTS.glob("*.md"))]
TOKENS = "tokens-small"
"""The study that tells what a difference is worth in tokens, with each of two optimizers."""
NUMBER = r"(?:< )?[+−]?\d[\d.,]*(?:e[+-]?\d+)?(?: \[[^\]]*\])?"
MARK = re.compile(rf"(?P<text>{NUMBER})(?P<mark><!--(?P<study>\S+)\s(?P<value>\w+)\s?(?P<of>.*?)-->)")
PICTURE = re.compile(
    r"!\[(?P<heading>[^\]]+)\]\((?P<file>pictures/(?P<name>[\w.-]+)-(?P<kind>[a-z_]+)\.svg)\)"
)
PICTURES = DRAWN | {"regret": draw_regret}


@functools.cache
def view(study: str) -> View:
    """The results of a recorded study."""
    found = read_archive(RESULTS / f"{study}.json", Path("of the record alone"))
    return build_view(found, load_results(found))


def find_contrast(study: str, formula: str) -> Contrasted:
    """A contrast: one of the study's by its name, or any formula."""
    found = view(study)
    named = {each.contrast.name: each for each in found.contrasted}
    if formula in named:
        return named[formula]
    rows = {name: each.levels for name, each in found.study.variants.items()}
    (contrast,) = read_contrasts({formula: formula}, [], found.study.levels, rows)
    return found.evaluate(contrast)


def find_estimate(study: str, formula: str) -> Estimate:
    """A contrast's value and interval."""
    found = find_contrast(study, formula)
    estimate = found.fits[0] if found.fits else found.values.interval
    assert estimate is not None, f"{study}: {formula} needs two pairs"
    return estimate


def difference(study: str, formula: str) -> str:
    """A contrast with its 95 % interval, in the unit of the measure."""
    found = find_estimate(study, formula)
    return interval(found.value, found.low, found.high)


def adjusted_p(study: str, name: str) -> str:
    """The p of a contrast of the study, adjusted for their number (Holm)."""
    found = find_contrast(study, name).adjusted
    assert found is not None, f"{study}: {name} has no adjusted p"
    return f"{found:.2g}" if found >= 1e-4 else "< 0.0001"


def tokens(study: str, words: str) -> str:
    """By how many percent more training tokens (fewer below 0) the loss would change as much, with the
    interval of the contrast; LINE FORMULA."""
    line, formula = words.split(" ", 1)
    found = find_estimate(study, formula)
    value, high, low = (percent_of_tokens(line, each) for each in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def worth(_: str, words: str) -> str:
    """As tokens, for a loss that is lower by so many nats; LINE NATS."""
    line, nats = words.split()
    return percent_of_tokens(line, -float(nats)).lstrip("+")


def percent_of_tokens(line: str, nats: float) -> str:
    """By how many percent more training tokens would change the loss by *nats*; fewer below 0."""
    percent = 100 * (math.exp(nats / slope(line)) - 1)
    return f"{percent:+.{int(abs(percent) < 10)}f}".replace("-", "−")


def loss_by_tokens(line: str) -> tuple[list[float], list[float]]:
    """Logarithms of the training tokens, and losses of the recorded runs.

    Args:
        line: an optimizer of TOKENS, or a study that varies nothing but the steps.
    """
    if line in view(TOKENS).study.levels["optimizer"]:
        runs = [run for run in view(TOKENS).results if run.planned.definition.levels[0] == line]
    else:
        runs = list(view(line).results)
    return [math.log(run.rows[-1]["tokens"]) for run in runs], [run.rows[-1]["val_loss"] for run in runs]


def slope(line: str) -> float:
    """How the loss changes with the logarithm of the training tokens, by least squares over recorded runs."""
    return linear_regression(*loss_by_tokens(line)).slope


def doubling(_: str, line: str) -> str:
    """How twice the training tokens change the loss."""
    return f"{slope(line) * math.log(2):+.2f}".replace("-", "−")


def deviation(_: str, line: str) -> str:
    """The largest distance of a number of tokens' mean loss from the line."""
    logarithms, losses = loss_by_tokens(line)
    fit = linear_regression(logarithms, losses)
    means = {at: mean(y for x, y in zip(logarithms, losses, strict=True) if x == at) for at in logarithms}
    return f"{max(abs(y - fit.intercept - fit.slope * x) for x, y in means.items()):.3f}"


def seeds(study: str, _: str) -> str:
    """How many seeds the study has."""
    return str(len(view(study).study.file.seeds))


def runs(study: str, _: str) -> str:
    """How many runs are finished."""
    return str(sum(run.state == "finished" for run in view(study).results))


def hours(study: str, _: str) -> str:
    """Hours of training of all runs, each on its own core."""
    return f"{sum(run.rows[-1]['seconds'] for run in view(study).results if run.rows) / 3600:.1f}"


def interval(value: float, low: float, high: float) -> str:
    """As the page writes it."""
    return interval_text(value, low, high).replace("-", "−")


VALUES: dict[str, Callable[[str, str], str]] = {
    each.__name__: each
    for each in (difference, adjusted_p, tokens, worth, doubling, deviation, seeds, runs, hours)
}


def refresh(text: str) -> str:
    """The page with every marked number recomputed."""

    def number(match: re.Match[str]) -> str:
        return VALUES[match["value"]](match["study"], match["of"]) + match["mark"]

    return MARK.sub(number, text)


def draw(text: str, folder: Path) -> Iterator[Path]:
    """Draw every picture of the page."""
    for match in PICTURE.finditer(text):
        path = folder / match["file"]
        if not PICTURES[match["kind"]](view(match["name"]), path, match["heading"]):
            raise UserError(f"figures: {match['file']}: the results have nothing to draw")
        yield path


def main(arguments: list[str]) -> int:
    """Bring the pages and their pictures up to date; with --check only compare: 1 if a number differs."""
    changed = False
    for page in PAGES:
        text = page.read_text("utf-8")
        new = refresh(text)
        for old, now in zip(text.splitlines(), new.splitlines(), strict=True):
            if old != now:
                print(f"{page.relative_to(ROOT)}\n- {old}\n+ {now}")
        changed |= new != text
        if "--check" not in arguments:
            page.write_text(new, "utf-8")
            for path in draw(new, page.parent):
                print(f"wrote {path.relative_to(ROOT)}")
    return int(changed and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
