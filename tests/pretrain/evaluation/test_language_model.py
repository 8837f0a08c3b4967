"""Batches that do not fit, and tasks of one's own: with a model that knows nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.helpers.items import write_data_sets

pytest.importorskip("lm_eval")

from pretrain.evaluation import scores as scoring
from pretrain.evaluation.language_model import ZeroShotModel
from pretrain.evaluation.scores import load_tasks, resolve_tasks, score, table, task_manager

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


class Unknowing:
    """Logits that depend on the token alone, and memory for so many tokens."""

    def __init__(self, vocab_size, fits=10**9):
        self.table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
        self.fits, self.shapes, self.failed = fits, [], 0

    def __call__(self, tokens):
        if tokens.numel() > self.fits:
            self.failed += 1
            raise torch.OutOfMemoryError("out of memory")
        self.shapes.append(tuple(tokens.shape))
        return self.table[tokens]


def scores(tokenizer, fits, requests):
    network = Unknowing(tokenizer.vocab_size, fits)
    model = ZeroShotModel(network, tokenizer, 64, torch.device("cpu"), batch_tokens=400)
    return [model._loglikelihood_tokens(part) for part in requests], network


def test_a_batch_that_does_not_fit_is_halved_once_and_for_all(small):
    """400 tokens do not fit, 110 do: 400, 200, then 100 for every later batch, of later tasks too."""
    requests = [[("", [1, 2, 3], list(range(3, 10)))] * 90] * 2
    expected, _ = scores(small.tokenizer, 10**9, requests)
    found, network = scores(small.tokenizer, 110, requests)
    assert found == expected
    assert network.failed == 2
    assert max(rows * width for rows, width in network.shapes) == 99  # 11 rows of 9


def test_a_single_sequence_that_does_not_fit_is_an_error(small):
    with pytest.raises(torch.OutOfMemoryError):
        scores(small.tokenizer, 5, [[("", [1, 2, 3], list(range(3, 10)))] * 4])


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

    network = Unknowing(small.tokenizer.vocab_size)
    model = Listening(network, small.tokenizer, 512, torch.device("cpu"))
    results = score(model, load_tasks(resolve_tasks(names, manager), manager, data), limit=3, shots=2)
    assert results["n-shot"] == {"mine": 2, "none": 0}  # as in lm-eval: a task that says 0 keeps it
    assert {text.count("Question:") for text in asked if "Question:" in text} == {1, 3}
    assert "mine  acc " in table(results)
    plain = score(model, load_tasks(resolve_tasks(["mine"], manager), manager, data), limit=2)
    assert plain["n-shot"] == {"mine": 0}
