"""Tasks of one's own, with a model that knows nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.helpers.items import write_data_sets
from tests.helpers.training import alone

pytest.importorskip("lm_eval")

from pretrain.evaluation import scores as scoring
from pretrain.evaluation.checks import resolve_tasks
from pretrain.evaluation.language_model import ZeroShotModel
from pretrain.evaluation.scores import load_tasks, score, task_manager

TASK = """
task: {name}
dataset_path: baber/piqa
output_type: multiple_choice
training_split: train
validation_split: validation
doc_to_text: "Question: {{{{goal}}}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{{{[sol1, sol2]}}}}"
metric_list:
  - metric: acc
{more}
"""


@pytest.fixture(scope="module", autouse=True)
def without_lm_evals_own_tasks():
    """Its ten thousand files take seconds to read, and are not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "TaskManager", partial(scoring.TaskManager, include_defaults=False))
        yield


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with two tasks, and the data set that they read."""
    root = tmp_path_factory.mktemp("own")
    (root / "tasks").mkdir()
    (root / "tasks" / "mine.yaml").write_text(TASK.format(name="mine", more=""))
    (root / "tasks" / "none.yaml").write_text(TASK.format(name="none", more="num_fewshot: 0"))
    return root / "tasks", write_data_sets(root / "data")


@pytest.mark.slow  # lm-eval reads ten thousand files
@pytest.mark.parametrize("by", ["file", "name"])
def test_tasks_of_ones_own(own, small, by):
    folder, data = own
    manager = task_manager(str(folder))
    names = ["mine", "none"] if by == "name" else [str(folder / "mine.yaml"), str(folder / "none.yaml")]
    asked = []

    class Listening(ZeroShotModel):
        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            asked.append(string)
            return super().tok_encode(string)

    rows = torch.randn(2 * [small.tokenizer.vocab_size], generator=torch.Generator().manual_seed(0))
    model = Listening(lambda tokens: rows[tokens], small.tokenizer, 512, alone())
    results = score(
        model, load_tasks(resolve_tasks(names, manager.all_tasks), manager, data), limit=3, shots=2
    )
    assert results["n-shot"] == {"mine": 2, "none": 0}  # as in lm-eval: a task that says 0 keeps it
    assert {text.count("Question:") for text in asked if "Question:" in text} == {1, 3}
    plain = score(model, load_tasks(resolve_tasks(["mine"], manager.all_tasks), manager, data), limit=2)
    assert plain["n-shot"] == {"mine": 0}
