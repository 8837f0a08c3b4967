"""Tasks of one's own, with a model that knows nothing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.items import write_data_sets
from tests.helpers.refusals import refused
from tests.helpers.training import alone

pytest.importorskip("lm_eval")

import datasets

from pretrain.data.corpus import Corpus
from pretrain.engine.patches import prepare_deepspeed
from pretrain.evaluation import scores as scoring
from pretrain.evaluation.checks import resolve_tasks
from pretrain.evaluation.data_sets import use_data_sets
from pretrain.evaluation.language_model import ZeroShotModel
from pretrain.evaluation.scores import check_answers, headline, load_tasks, score, task_manager
from pretrain.runtime.world import World, start_world

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


@pytest.mark.slow  # importing lm-eval takes longer than the rest
@pytest.mark.parametrize("by", ["file", "name"])
def test_tasks_of_ones_own(own, small, by):
    folder, data = own
    names = ["mine", "none"] if by == "name" else [str(folder / "mine.yaml"), str(folder / "none.yaml")]
    manager = task_manager(",".join(names), str(folder))
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


def chain(tokenizer):
    """A model in which the next token depends on the last one alone; logits [vocabulary, vocabulary]."""
    return torch.randn(2 * [tokenizer.vocab_size], generator=torch.Generator().manual_seed(1))


def requests(*given):
    return [SimpleNamespace(args=(context, settings)) for context, settings in given]


def continued(tokenizer, context, most, until=()):
    """The greedy continuation, token by token, by hand."""
    rows, ids, written = chain(tokenizer), list(tokenizer.encode(context)), []
    while len(written) < most and (token := int(rows[ids[-1]].argmax())) != tokenizer.end_of_document:
        ids.append(token)
        written.append(token)
    text = tokenizer.decode(written)
    return min((text.partition(stop)[0] for stop in until), key=len, default=text)


def written_on(corpus, ranks, given):
    tokenizer = Corpus.open(corpus).tokenizer
    world = alone()
    if ranks > 1:
        prepare_deepspeed()
        world = start_world(1, False)
    rows = chain(tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], tokenizer, 40, world, batch_tokens=60)
    return model.generate_until(requests(*given)), model.truncated


def test_texts_are_continued_until_they_are_to_end(small, small_folder):
    tokenizer = small.tokenizer
    whole = continued(tokenizer, "def f", 12)
    stop = whole[3:5]
    given = [
        ("def f", {"max_gen_toks": 12}),
        ("def f", {"max_gen_toks": 12, "until": [stop, "never"]}),
        ("def f", {"max_gen_toks": 12, "until": stop}),
        ("import os\n" * 20, {"max_gen_toks": 5}),  # cut on the left, and the same last token
        ("x", {"max_gen_toks": 3, "until": []}),
    ]
    texts, truncated = written_on(small_folder, 1, given)
    assert texts == [
        whole,
        continued(tokenizer, "def f", 12, [stop]),
        continued(tokenizer, "def f", 12, [stop]),
        continued(tokenizer, "import os\n" * 20, 5),
        continued(tokenizer, "x", 3),
    ]
    assert texts[1] == whole.partition(stop)[0] != whole and truncated == 1
    # Two ranks, of which one has more to write: the same texts, in the order of the requests.
    shared = run_distributed(written_on, 2, small_folder, 2, given, timeout=120)
    assert [found for found, _ in shared] == [texts, texts]


def test_a_document_ends_a_text_and_a_sample_depends_on_its_request_alone(small):
    tokenizer = small.tokenizer
    rows = chain(tokenizer)
    rows[:, tokenizer.end_of_document] = 100.0
    ends = ZeroShotModel(lambda tokens: rows[tokens], tokenizer, 40, alone())
    assert ends.generate_until(requests(("def f", {"max_gen_toks": 9}))) == [""]
    flat = ZeroShotModel(lambda tokens: chain(tokenizer)[tokens] * 0.1, tokenizer, 40, alone())
    sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    both = flat.generate_until(requests(("def f", sampled), ("def f", sampled)))
    assert both[0] != both[1] and flat.generate_until(requests(("def f", sampled))) == both[:1]
    cold = flat.generate_until(requests(("def f", sampled | {"temperature": 0.0})))
    assert cold == [continued(tokenizer, "def f", 8)]
    # As lm-eval reads them: a temperature samples unless do_sample is false; the length has four names.
    unsaid = {"max_new_tokens": 8, "temperature": 1.0}
    assert flat.generate_until(requests(("def f", unsaid), ("def f", unsaid))) == both
    assert flat.generate_until(requests(("def f", unsaid | {"do_sample": False}))) == cold
    for wanted in ({"max_tokens": 40}, {}):  # 256 where a task does not say
        with refused("tasks: an answer of up to", "in the context of 40; set max_gen_toks"):
            flat.generate_until(requests(("def f", wanted)))


def log_likelihood(rows, previous, ids):
    return sum(rows[a].double().log_softmax(-1)[b].item() for a, b in zip(previous, ids, strict=True))


@pytest.mark.parametrize(
    ("context", "answer", "before", "scored"),
    [
        ("def f(", "x", "def f(", "x"),
        ("def f(", ")", "def f(", ")"),  # the tokenizer has "()"
        ("  ", "x", None, "  x"),
        ("", "x", None, "x"),
    ],
)
def test_every_answer_is_scored_after_a_context(small, context, answer, before, scored):
    tokenizer = small.tokenizer
    rows = chain(tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], tokenizer, 40, alone())
    ids = list(tokenizer.encode(scored))
    last = tokenizer.encode(before)[-1] if before else tokenizer.end_of_document
    previous = [last, *ids[:-1]]
    ((found, greedy),) = model.loglikelihood(requests((context, answer)))
    assert found == pytest.approx(log_likelihood(rows, previous, ids), rel=1e-5) and not greedy


def test_whole_texts_are_scored_in_windows(small):
    tokenizer, rows = small.tokenizer, chain(small.tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], tokenizer, 8, alone())
    texts = ["import os\n" * 20, "x", "def f(a, b):\n    return a"]
    expected = []
    for text in texts:
        ids = list(tokenizer.encode(text))
        expected.append(log_likelihood(rows, [tokenizer.end_of_document, *ids[:-1]], ids))
    assert len(tokenizer.encode(texts[0])) > 24
    asked = [SimpleNamespace(args=(text,)) for text in texts]
    assert model.loglikelihood_rolling(asked) == pytest.approx(expected, rel=1e-5)


def test_a_long_context_is_cut_on_the_left_alone(small):
    """The model sees as many tokens as it takes."""
    rows, seen = chain(small.tokenizer), []

    def logits_of(tokens):
        seen.append(tokens)
        return rows[tokens]

    model = ZeroShotModel(logits_of, small.tokenizer, 8, alone())
    context, scored = list(range(2, 22)), [30, 31]
    ((found, _),) = model._loglikelihood_tokens([(None, context, scored)])
    assert seen[-1].tolist() == [[*context[-7:], 30]] and model.truncated == 1
    assert found == pytest.approx(log_likelihood(rows, [context[-1], 30], scored), rel=1e-5)


def test_greedy_means_every_token_of_the_answer(small):
    rows = chain(small.tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], small.tokenizer, 40, alone())
    first = int(rows[5].argmax())
    second = int(rows[first].argmax())
    asked = [(None, [5], [first, second]), (None, [5], [first, second - 1 if second else 1])]
    assert [greedy for _, greedy in model._loglikelihood_tokens(asked)] == [True, False]


def test_an_answer_without_tokens_is_refused(small):
    rows = chain(small.tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], small.tokenizer, 40, alone())
    with refused("tasks: an answer is empty"):
        model.loglikelihood(requests(("def f", "")))


def test_all_ranks_form_the_same_batches(small, monkeypatch):
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value - 7])
    rows = chain(small.tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], small.tokenizer, 40, alone())
    monkeypatch.undo()
    assert model.batch_tokens == ZeroShotModel(model.logits_of, small.tokenizer, 40, alone()).batch_tokens - 7


def test_scores_of_several_filters_are_all_kept():
    results = {
        "gsm": {"exact,strict": 0.1, "exact_stderr,strict": 0.0, "exact,flexible": 0.5, "alias": "gsm"},
        "piqa": {"acc,none": 0.6},
    }
    assert headline({"results": results}) == {
        "gsm/exact,strict": 0.1,
        "gsm/exact,flexible": 0.5,
        "piqa/acc": 0.6,
    }


def test_a_group_hides_its_subtasks_if_it_has_a_score():
    score = {"acc,none": 0.5, "alias": "x"}
    results = {"mean": score, "list": {"alias": "list"}, "a": score, "b": score, "c": score}
    groups = {"mean": ["a", "b"], "list": ["c", "a"]}
    found = {"results": results, "group_subtasks": groups}
    assert [*headline(found)] == ["mean/acc", "c/acc"]


def test_logits_that_are_not_finite_are_no_answer(small):
    tokenizer = small.tokenizer

    def overflowing(tokens):
        logits = chain(tokenizer)[tokens].half()
        logits[:, -1, 5] = torch.inf
        return logits

    model = ZeroShotModel(overflowing, tokenizer, 40, alone())
    why = "model: its logits are not finite in float16; give an earlier checkpoint, or compute in float32"
    with refused(why):
        model.loglikelihood(requests(("def f", "x")))
    with refused(why):
        model.generate_until(requests(("def f", {"max_gen_toks": 3})))


def test_rows_of_the_embedding_without_a_token_are_never_written(small):
    def wider(tokens):
        logits = chain(small.tokenizer)[tokens]
        return torch.cat((logits, logits.new_full((*logits.shape[:2], 7), 50.0)), -1)

    model = ZeroShotModel(wider, small.tokenizer, 40, alone())
    found = model.generate_until(requests(("def f", {"max_gen_toks": 8})))
    assert found == [continued(small.tokenizer, "def f", 8)]


def test_data_sets_of_one_path_with_other_files_are_kept_apart(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    for _ in range(2):  # saved, and read
        with use_data_sets(tmp_path / "sets", save=True):
            found = [
                datasets.load_dataset("json", data_files={"test": str(tmp_path / f"{name}.jsonl")})
                for name in ("one", "two")
            ]
        assert [each["test"]["text"][0] for each in found] == ["one", "two"]
    with use_data_sets(tmp_path / "sets"), refused("data_dir: "):
        datasets.load_dataset("json")


def test_a_data_set_of_this_machine_is_read_where_it_is(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "own/test.parquet")
    for save in (True, False):
        with use_data_sets(tmp_path / "sets", save=save):
            assert datasets.load_dataset(str(tmp_path / "own"))["test"]["text"][0] == "a"
    assert not (tmp_path / "sets").exists()


def test_a_task_that_is_scored_by_what_is_written(own, small):
    folder, data = own
    (folder / "written.yaml").write_text(
        TASK.format(name="written", more="")
        .replace("output_type: multiple_choice", "output_type: generate_until")
        .replace("doc_to_target: label", 'doc_to_target: "{{goal}}"')
        .replace('doc_to_choice: "{{[sol1, sol2]}}"', "generation_kwargs: {until: [], max_gen_toks: 4}")
        .replace("metric: acc", "metric: exact_match")
    )
    rows = chain(small.tokenizer)
    model = ZeroShotModel(lambda tokens: rows[tokens], small.tokenizer, 512, alone())
    names = resolve_tasks([str(folder / "written.yaml")], ())
    loaded = load_tasks(names, task_manager(names[0], str(folder)), data)
    check_answers(loaded, 5)
    with refused("tasks: written: an answer of up to 4 tokens leaves no room", "context of 4"):
        check_answers(loaded, 4)
    results = score(model, loaded, limit=3)
    assert results["n-samples"]["written"]["effective"] == 3
    assert results["results"]["written"]["exact_match,none"] == 0.0
