"""Progress in a log."""

import io

from pretrain.utils.format import ProgressLine


def test_progress_is_a_line_every_few_seconds_in_a_log():
    stream, times = io.StringIO(), iter([0.0, 1.0, 6.0, 7.0, 12.0])
    with ProgressLine("heads removed", "pass", stream, clock=lambda: next(times)) as progress:
        for done in range(1, 5):
            progress(done, 8)
    assert stream.getvalue().splitlines() == [
        "heads removed: pass 2 of 8, 18s left",
        "heads removed: pass 4 of 8, 12s left",
    ]
