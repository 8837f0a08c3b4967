"""What is known of tasks before lm-eval is imported."""

from pathlib import Path

import pytest

from pretrain.evaluation import checks

pytest.importorskip("lm_eval")


@pytest.mark.slow
def test_names_that_are_checked_first_contain_lm_evals():
    import lm_eval.tasks

    names = checks._names_in(checks._task_files(str(Path(lm_eval.tasks.__file__).parent)))
    known = set(lm_eval.tasks.TaskManager().all_tasks)
    assert len(known) > 10_000
    assert known <= names and len(names) < 1.1 * len(known)
