"""Training moves the activations of a wide model as far as those of a narrow one, with muP alone."""

import statistics

import pytest

from benchmarks.coordinates import changes_of, model_of, run_of, slopes

WIDTHS = (64, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--optimizer.kind muon --muon.learning_rate 4e-3",
        "--optimizer.kind muon --muon.scale spectral --muon.learning_rate 0.02 --muon.heads each",
    ],
)
def test_activations_change_as_much_at_every_width(flags):
    run = run_of(["--optimizer.learning_rate", "1e-3", *flags.split()])
    found = {}
    for kind in ("standard", "mup"):
        changes = [changes_of(model_of(width, WIDTHS[0], kind), run) for width in WIDTHS]
        found[kind] = [abs(by_step[-1]) for by_step in slopes(WIDTHS, changes).values()]
    # Between two widths single activations differ by chance; at higher rates they differ more.
    assert statistics.mean(found["mup"]) < 0.15 < 0.5 < statistics.mean(found["standard"]), found
