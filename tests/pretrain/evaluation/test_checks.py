"""What is known of tasks before lm-eval is imported."""

import os
import random

import pytest

from model.errors import UserError
from pretrain.assembly.preflight import check_start
from pretrain.config.run_config import RunConfig
from pretrain.config.sections import EvaluationConfig
from pretrain.evaluation import checks
from tests.helpers.refusals import refused

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def everything():
    """lm-eval's index of all its tasks."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


@pytest.mark.slow
def test_names_that_are_checked_first_contain_lm_evals(everything):
    names, known = checks.library_files().keys(), set(everything.all_tasks)
    assert len(known) > 10_000
    assert known <= names and len(names) < 1.1 * len(known)


@pytest.mark.slow
def test_a_part_of_lm_evals_tasks_has_what_all_of_them_have(everything, tmp_path):
    """Names and groups, alone and together, and a group of one's own that names lm-eval's."""
    from pretrain.evaluation.scores import _with_members, task_manager

    draw = random.Random(0)
    drawn = draw.sample(everything.all_subtasks, 12)
    groups = [name for name in draw.sample(everything.all_groups, 8) if _with_members([name], everything)[1]]
    for asked in ("papers", "piqa, gsm8k", "blimp,lambada_openai", *drawn, *groups[:3]):
        manager = task_manager(asked)
        names = [name.strip() for name in asked.split(",")]
        names = [task for name in names for task in checks.GROUPS.get(name, (name,))]
        assert len(manager.all_tasks) < len(everything.all_tasks) / 4, asked
        for name in _with_members(names, everything)[0]:
            assert vars(manager.task_index[name]) == vars(everything.task_index[name])
    (tmp_path / "own.yaml").write_text("group: own\ntask: [piqa, arc_easy]\n")
    own = task_manager("own", str(tmp_path))
    assert {"own", "piqa", "arc_easy"} <= set(own.all_tasks) and len(own.all_tasks) < 1000
    assert task_manager("nowhere").all_tasks == everything.all_tasks
    (tmp_path / "none.yaml").write_text("group: none_of_them\n")
    with refused(
        "none.yaml names none (task: None); give it a list", begins="tasks: the group 'none_of_them'"
    ):
        task_manager("none_of_them", str(tmp_path))


@pytest.mark.slow
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
