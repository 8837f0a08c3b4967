import pytest
import torch

from model.errors import UserError
from model.transformer import Transformer
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.weights_only import write_weights
from pretrain.data.tokenizer import SentencePieceTokenizer
from pretrain.hf.open_model import open_model
from pretrain.prepare.sources.plain_files import BuiltinCorpus
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, network, relative, tokens


@pytest.fixture(scope="module")
def run_and_export(tmp_path_factory):
    """A run of step 3 and the native folder of the same network."""
    root, ours = tmp_path_factory.mktemp("opened"), network("prism")
    tokenizer = SentencePieceTokenizer.train(iter(["a aa aaa " * 20]), CONFIGS["prism"].vocab_size)
    export = write_folder(ours, root / "export")
    tokenizer.save(export)
    tokenizer.save(root / "tokenizer")
    state = TrainingState(step=3, model=CONFIGS["prism"].to_json())
    target = root / "run" / "checkpoints" / "step_000003"
    write_weights(target, state, ours.named_parameters(), root / "tokenizer")
    return root / "run", export


@torch.no_grad()
def test_a_run_and_its_export_compute_what_the_network_computes(run_and_export):
    ids = tokens(2, 40)
    expected = network("prism")(ids)
    for folder, step in zip(run_and_export, (3, None), strict=True):
        opened = open_model(str(folder))
        assert (opened.step, opened.context_length, opened.tokenizer.vocab_size) == (step, 64, 260)
        assert isinstance(opened.network, Transformer) == (step is not None) and not opened.network.training
        assert relative(opened.logits(ids.to(opened.device)).cpu()[..., :260], expected[..., :260]) < 1e-5


def test_the_dtype_is_the_one_asked_for(run_and_export):
    for folder in run_and_export:
        for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
            opened = open_model(str(folder), dtype=dtype)
            assert {weight.dtype for weight in opened.network.parameters()} == {expected}


def test_what_cannot_be_opened_is_refused(run_and_export, tmp_path):
    run, export = map(str, run_and_export)
    with pytest.raises(UserError, match="no checkpoint of step 5"):
        open_model(run, 5)
    with pytest.raises(UserError, match=r"step: 3 was given, but .* is not a run's folder"):
        open_model(export, 3)
    with pytest.raises(UserError, match="does not exist; give an exported folder or a run's folder"):
        open_model(str(tmp_path / "nowhere"))
    folder = write_folder(network("prism"), tmp_path / "other")
    documents = BuiltinCorpus().documents()
    larger = SentencePieceTokenizer.train((next(documents).text for _ in range(20)), 400)
    larger.save(folder)
    with pytest.raises(UserError, match="has 400 entries, its model only 260; put the model's own tokenizer"):
        open_model(str(folder))
