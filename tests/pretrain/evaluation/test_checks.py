"""What is known of tasks before lm-eval is imported."""

import os
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.assembly.preflight import check_start
from pretrain.config.run_config import RunConfig
from pretrain.config.sections import EvaluationConfig
from pretrain.evaluation import checks

pytest.importorskip("lm_eval")


@pytest.mark.slow
def test_names_that_are_checked_first_contain_lm_evals():
    import lm_eval.tasks

    names = checks._find_names(checks._task_files(str(Path(lm_eval.tasks.__file__).parent)))
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


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tasks": "piqa,nope"}, "evaluation.tasks: 'nope' is unknown"),
        ({"tasks": "pica"}, "evaluation.tasks: 'pica' is unknown; did you mean 'piqa'?"),
        ({"include_path": "/nowhere"}, "evaluation.include_path: '/nowhere' is not a folder"),
        ({"data_dir": "/nowhere"}, "evaluation.data_dir: '/nowhere' is not a folder"),
    ],
)
def test_a_run_refuses_tasks_before_data_is_made(tmp_path, settings, line):
    run = RunConfig(data=str(tmp_path), evaluation=EvaluationConfig(every=5, **{"tasks": "piqa"} | settings))
    with pytest.raises(UserError) as refused:
        check_start(run)
    assert str(refused.value).startswith(line)


def test_what_no_run_evaluates_is_not_looked_at(tmp_path):
    check_start(RunConfig(data=str(tmp_path), evaluation=EvaluationConfig(every=0, tasks="nope")))
