"""The command on runs and on exported folders, which say the same, and its streamed text."""

import pytest

from model.sampling import make_cached_predictor, make_recomputing_predictor, sample
from pretrain import convert
from pretrain import generate as command
from pretrain.generate import make_exported_predictor, text_pieces
from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM
from tests.helpers.exports import trained, write_folder
from tests.helpers.networks import network, tokens
from tests.helpers.refusals import refusal


def test_exported_and_ours_sample_the_same(tmp_path):
    folder = write_folder(network("prism"), tmp_path / "hf")
    theirs = HeadScheduleForCausalLM.from_pretrained(folder).eval()
    prompt = tokens(1, 7)[0].tolist()
    for predict in (
        make_exported_predictor(theirs),
        make_recomputing_predictor(lambda window: theirs(window).logits, 64),
    ):
        assert list(sample(predict, prompt, 80, 0.9, 0.95, 5)) == list(
            sample(make_cached_predictor(network("prism")), prompt, 80, 0.9, 0.95, 5)
        )


def test_streamed_pieces_are_whole_characters(small):
    tokenizer = small.tokenizer
    text = "naïve 日本語 🙂 done"
    pieces = list(text_pieces(iter(tokenizer.encode(text)), tokenizer))
    assert "".join(pieces) == text and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    ended = [*tokenizer.encode("a b"), tokenizer.end_of_document, *tokenizer.encode("never")]
    assert "".join(text_pieces(iter(ended), tokenizer)) == "a b"


def test_a_space_after_the_prompt_is_kept():
    """Tokenizers of Llama's kind drop the first space of what they decode."""

    class Stripping:
        end_of_document = 0
        texts = ("", " a", " b", "c")

        def decode(self, ids):
            return "".join(self.texts[token] for token in ids).removeprefix(" ")

    assert "".join(text_pieces(iter([2, 3, 1]), Stripping(), [1])) == " bc a"
    assert "".join(text_pieces(iter([2, 3]), Stripping())) == "bc"


def test_streamed_pieces_of_text_that_ends_in_half_a_character(small):
    ids = small.tokenizer.encode("x日")[:-1]
    assert "".join(text_pieces(iter(ids), small.tokenizer)).startswith("x")


@pytest.fixture(scope="module")
def run(small_folder, tmp_path_factory):
    return trained(small_folder, tmp_path_factory.mktemp("runs"), "prism").folder


def export(run, out, name):
    assert convert.main([str(run), "--out", str(out), "--format", name]) == 0
    return out


@pytest.mark.slow
def test_the_command_says_the_same_for_run_and_exports(run, tmp_path, capsys):
    printed = []
    for folder in (run, *(export(run, tmp_path / name, name) for name in ("native", "llama"))):
        capsys.readouterr()
        assert command.main([str(folder), "--prompt", "def main(", "--tokens", "70", "--seed", "3"]) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1
    assert printed[0].startswith("def main(") and len(printed[0]) > 20


def test_without_a_prompt_a_document_is_made_up(run, capsys):
    assert command.main([str(run), "--tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


def test_a_note_says_that_a_prompt_ends_in_a_token_for_the_space(run, capsys):
    for prompt, noted in (("return", False), ("return ", True)):
        assert command.main([str(run), "--tokens", "1", "--prompt", prompt]) == 0
        assert ("the prompt ends in a space" in capsys.readouterr().err) is noted


REFUSED = {
    "nowhere": "does not exist",
    "{empty}": "has no config.json",
    "{run} --top_p 0": "top_p: '0' is not valid",
    "{run} --prompt caf\udce9": "prompt: 'caf\\udce9' is not UTF-8 text",
    "{run} --step 5": "no checkpoint of step 5",
    "{native} --step 5": "is not a run's folder",
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.items())
def test_bad_input_is_one_line(arguments, words, run, tmp_path, capsys):
    native = write_folder(network("prism"), tmp_path / "native") if "{native}" in arguments else None
    filled = [text.format(run=run, native=native, empty=tmp_path) for text in arguments.split()]
    assert words in refusal(capsys, command.main, *filled)


def test_a_folder_with_code_of_its_own_is_not_run(tmp_path, capsys):
    config = '{"model_type": "theirs", "auto_map": {"AutoConfig": "evil.Config"}}'
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    assert "model_type 'theirs' is not supported" in refusal(capsys, command.main, tmp_path)
