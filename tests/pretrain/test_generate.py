"""Sampling: distributions, caches, streaming; the command on runs and on exported folders."""

import pytest
import torch

from pretrain import convert
from pretrain import generate as command
from pretrain.generate import cached, cached_exported, generate, pick, recomputed, sample, text_pieces
from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM
from tests.helpers.exports import trained
from tests.helpers.networks import CONFIGS, network, tokens, write_folder


def test_pick_follows_temperature_and_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert {pick(logits, 0, 1.0, generator) for _ in range(5)} == {0}
    # Probabilities 0.64, 0.24, 0.09, 0.03: the first two reach 0.8.
    assert {pick(logits, 1.0, 0.8, generator) for _ in range(200)} == {0, 1}
    counts = torch.bincount(
        torch.tensor([pick(logits, 1.0, 1.0, generator) for _ in range(4000)]), minlength=4
    )
    # Four standard deviations of a share of 4,000 draws are 0.03.
    torch.testing.assert_close(counts / 4000, logits.softmax(0), atol=0.03, rtol=0)


@pytest.mark.parametrize("name", ["prism", "grouped", "gptneo_windows"])
def test_cache_changes_no_token_even_beyond_the_context(name):
    """64 positions of context; 90 tokens are asked for."""
    ours = network(name)
    prompt = tokens(1, 7)[0].tolist()
    options = {"count": 90, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    assert list(sample(cached(ours), prompt, **options)) == list(
        sample(recomputed(ours, 64), prompt, **options)
    )
    assert generate(ours, prompt, 90, 64, 0.9, 0.95, 5) == list(sample(cached(ours), prompt, **options))


def test_exported_and_ours_sample_the_same(tmp_path):
    folder = write_folder(network("prism"), tmp_path / "hf")
    theirs = HeadScheduleForCausalLM.from_pretrained(folder).eval()
    prompt = tokens(1, 7)[0].tolist()
    for predict in (cached_exported(theirs), recomputed(lambda window: theirs(window).logits, 64)):
        assert list(sample(predict, prompt, 80, 0.9, 0.95, 5)) == list(
            sample(cached(network("prism")), prompt, 80, 0.9, 0.95, 5)
        )


def test_same_seed_same_text():
    predict, prompt = recomputed(network("prism"), 64), [5, 6]
    assert list(sample(predict, prompt, 20, 1.0, 1.0, 1)) == list(sample(predict, prompt, 20, 1.0, 1.0, 1))
    assert list(sample(predict, prompt, 20, 1.0, 1.0, 1)) != list(sample(predict, prompt, 20, 1.0, 1.0, 2))


def test_a_prompt_longer_than_the_context():
    ours = network("prism")
    prompt = tokens(1, 100)[0].tolist()
    assert len(list(sample(cached(ours), prompt, 3, 0, 1, 0))) == 3


def test_streamed_pieces_are_whole_characters(small):
    tokenizer = small.tokenizer
    text = "naïve 日本語 🙂 done"
    pieces = list(text_pieces(iter(tokenizer.encode(text)), tokenizer))
    assert "".join(pieces) == text and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    ended = [*tokenizer.encode("a b"), tokenizer.end_of_document, *tokenizer.encode("never")]
    assert "".join(text_pieces(iter(ended), tokenizer)) == "a b"


def test_streamed_pieces_of_text_that_ends_in_half_a_character(small):
    ids = small.tokenizer.encode("x日")[:-1]
    assert "".join(text_pieces(iter(ids), small.tokenizer)).startswith("x")


@pytest.fixture(scope="module")
def run_and_exports(small_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("generate")
    run = trained(small_folder, root / "runs", "prism").folder
    for name in ("native", "llama"):
        assert convert.main([str(run), "--out", str(root / name), "--format", name]) == 0
    return run, root / "native", root / "llama"


@pytest.mark.slow
def test_the_command_says_the_same_for_run_and_exports(run_and_exports, capsys):
    printed = []
    for folder in run_and_exports:
        for more in ([], ["--no_cache"]):
            capsys.readouterr()
            arguments = [str(folder), "--prompt", "def main(", "--tokens", "70", "--seed", "3", *more]
            assert command.main(arguments) == 0
            printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1
    assert printed[0].startswith("def main(") and len(printed[0]) > 20


def test_without_a_prompt_a_document_is_made_up(run_and_exports, capsys):
    assert command.main([str(run_and_exports[0]), "--tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "does not exist"),
        (["{empty}"], "has no config.json"),
        (["{run}", "--top_p", "0"], "top_p: 0.0 is not valid"),
        (["{run}", "--temperature", "-1"], "temperature: -1.0 is not valid"),
        (["{run}", "--temperature", "1e-320"], "temperature: 1e-320 is not valid; give zero"),
        (["{run}", "--temperature", "nan"], "temperature: nan is not valid"),
        (["{run}", "--prompt", "caf\udce9"], "prompt: 'caf\\udce9' is not UTF-8 text"),
        (["{run}", "--tokens", "0"], "tokens: 0 is not valid"),
        (["{run}", "--seed", "-1"], "seed: -1 is not valid"),
        (["{run}", "--step", "5"], "no checkpoint of step 5"),
        (["{native}", "--step", "5"], "is not a run's folder"),
        (["{run}", "--promt", "x"], "did you mean '--prompt'?"),
    ],
)
def test_bad_input_is_one_line(arguments, words, run_and_exports, tmp_path, capsys):
    run, native, _ = run_and_exports
    filled = [text.format(run=run, native=native, empty=tmp_path) for text in arguments]
    assert command.main(filled) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0]


def test_a_folder_with_code_of_its_own_is_not_run(run_and_exports, tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        '{"model_type": "theirs", "auto_map": {"AutoConfig": "evil.Config"}}'
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    assert command.main([str(tmp_path)]) == 2
    assert "needs code of its own" in capsys.readouterr().err


def test_every_config_has_a_cached_path():
    for name in CONFIGS:
        assert len(list(sample(cached(network(name)), [3], 3, 0, 1, 0))) == 3
