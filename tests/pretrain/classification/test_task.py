"""--task classification: the model that it makes, and the settings that it has no use for."""

import json

import pytest

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from tests.helpers.refusals import refused


def parsed(*arguments):
    return parse_command_line(["--task", "classification", *arguments]).run


WITH = "does not go with --task classification"
REFUSED = {
    "--document_mask true": f"document_mask: True {WITH}: every example is",
    "--sequence_parallel true": f"sequence_parallel: True {WITH}",
    "--evaluation.every 5": f"evaluation.every: 5 {WITH}: its tasks need",
    "--validation.data data/x": f"validation.data: data/x {WITH}",
    "--tokenizer gpt2": f"tokenizer: gpt2 {WITH}: a labelled corpus brings",
    "--architecture.classes 3": "architecture.classes: it comes from the data; leave it out",
    "--task language --architecture.classes 3": "architecture.classes: it comes from the data",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_refusals(arguments, message):
    with refused(begins=message):
        parsed(*arguments.split())


def test_an_unknown_task_is_named():
    with pytest.raises(UserError, match=r"task: 'classify' is not valid; give one of .*classification"):
        parse_command_line(["--task", "classify"])


def test_the_data_decides_the_number_of_classes(tmp_path):
    run = parsed("--config", "classification")
    assert run.build_model_config(300, classes=7).classes == 7
    assert run.build_model_config(300).classes == 2, "until the data is there"
    # A language model takes heads and sizes from a classifier's file, and the other way round.
    path = tmp_path / "model.json"
    path.write_text(json.dumps(run.build_model_config(300, classes=7).to_json()))
    language = parse_command_line(["--model", str(path)]).run.build_model_config(300)
    assert language.classes is None and language == run.build_model_config(300, classes=7).replace(
        classes=None
    )
    assert parsed("--model", str(path)).build_model_config(300, classes=3).classes == 3


def test_growth_and_classes_go_together():
    run = parsed(
        "--config", "micro", "--growth.criterion", "incrt", "--growth.maximum", "4", "--growth.head_dim", "16"
    )
    start = run.build_model_config(300, classes=5)
    assert start.classes == run.largest_model_config(start).classes == 5
