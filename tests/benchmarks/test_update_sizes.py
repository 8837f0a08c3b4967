"""The sizes of Muon's updates, by scale, whole and head by head."""

import math

from benchmarks.update_sizes import main, sizes
from pretrain.config.command_line import parse_command_line

FLAGS = "--model prism-nano --optimizer.kind muon --steps 20 --schedule.warmup 0"


def test_sizes_follow_the_head_count():
    """Singular values after five steps lie between 0.67 and 1.21 of what the scale says; those of a gradient
    of few tokens may be smaller, so that the largest alone is bounded."""
    rows = sizes(parse_command_line(FLAGS.split()).run, steps=3)
    assert len(rows) == 4 * 4 * 3 * 2
    for row in rows:
        largest = {"rms": 0.2 * math.sqrt(48), "spectral": 1.0, "unit": 1.0}[row["scale"]]
        most = 1.0
        if row["blocks"] == "each":
            most = math.sqrt(row["heads"])  # blocks below each other that agree
            if row["scale"] == "spectral":  # sqrt(d_h / d) of q, sqrt(d / d_h) of o
                largest *= math.sqrt(row["heads"]) ** (1 if row["part"] == "o" else -1)
        assert 0.67 < row["spectral norm"] / largest < 1.21 * most, row


def test_a_picture_and_a_table(tmp_path, capsys):
    picture = tmp_path / "sizes.png"
    main([*FLAGS.split()[:2], "--after", "2", "--plot", str(picture)])
    assert picture.stat().st_size > 1000
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4 * 4 * 2 and table[1].split()[:4] == ["k", "0", "2", "each"]
