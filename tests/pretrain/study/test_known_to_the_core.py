"""What the core knows of studies: they start runs, and train nothing."""

import pytest

from pretrain.runtime import version_check as agreement
from pretrain.runtime.environment import is_launcher


@pytest.mark.parametrize(
    "command",
    [
        "python3.11 -m pretrain.study",
        "python /opt/env/bin/pretrain-study",
        "python /opt/env/bin/head-schedules study",
    ],
)
def test_a_study_is_a_launcher_of_its_runs(command):
    assert is_launcher(f"/opt/env/bin/{command} run direction".split())


def test_code_that_only_looks_at_runs_is_no_other_code(tmp_path, monkeypatch):
    (tmp_path / "pretrain" / "study").mkdir(parents=True)
    (tmp_path / "pretrain" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    before = agreement.code_hash()
    (tmp_path / "pretrain" / "study" / "tables.py").write_text("x = 2\n")
    assert agreement.code_hash() == before
    (tmp_path / "pretrain" / "b.py").write_text("")
    assert agreement.code_hash() != before
    # A run makes its built-in corpus, and plans its micro-batch.
    for name in ("prepare", "plan"):
        before = agreement.code_hash()
        (tmp_path / "pretrain" / name).mkdir()
        (tmp_path / "pretrain" / name / "part.py").write_text("x = 1\n")
        assert agreement.code_hash() != before
