"""What is known of tasks before lm-eval is imported."""

import os
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.evaluation import checks

pytest.importorskip("lm_eval")


@pytest.mark.slow
def test_names_that_are_checked_first_contain_lm_evals():
    import lm_eval.tasks

    names = checks._names_in(checks._task_files(str(Path(lm_eval.tasks.__file__).parent)))
    known = set(lm_eval.tasks.TaskManager().all_tasks)
    assert len(known) > 10_000
    assert known <= names and len(names) < 1.1 * len(known)


def test_a_task_file_of_gigabytes_is_refused_unread(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text("task: mine\n")
    os.truncate(path, 1 << 34)  # sparse
    with pytest.raises(UserError, match=r"include_path: '.*task.yaml' has 17,179,869,184 bytes, more than"):
        checks.check_tasks("piqa", str(tmp_path))


def test_a_data_set_of_gigabytes_is_refused_unread(tmp_path):
    from pretrain.evaluation.data_sets import read_data_set

    path = tmp_path / "validation.jsonl"
    path.touch()
    os.truncate(path, 1 << 34)  # sparse
    with pytest.raises(UserError, match=r"data_dir: '.*validation.jsonl' has 17,179,869,184 bytes"):
        read_data_set(tmp_path)
