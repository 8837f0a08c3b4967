"""head-schedules prepare labelled: what it writes, and what it refuses."""

import json

import numpy as np
import pytest

from pretrain.classification.corpus import character_tokenizer
from pretrain.classification.sources import Example
from pretrain.data.corpus import Corpus
from pretrain.data.tokenizer import load_tokenizer
from pretrain.prepare.command import main
from tests.helpers.corpora import texts_of


def labelled(arguments: str) -> int:
    return main(["labelled", *arguments.split()])


@pytest.fixture
def tsv(tmp_path):
    """Forty sentences of two classes, as GLUE writes them."""
    path = tmp_path / "train.tsv"
    rows = [f'{"good" if n % 2 else "bad"} film number {n} "\t{n % 2}' for n in range(40)]
    path.write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return path


def test_a_task_of_two_files(tsv, tmp_path, capsys):
    dev = tmp_path / "dev.tsv"
    dev.write_text("sentence\tlabel\nan other film\t1\nbad\t0\n")
    out = tmp_path / "sst2"
    command = f"--train {tsv} --validation {dev} --out {out} --train_tokenizer"
    assert labelled(f"{command} 290") == 0
    printed = capsys.readouterr().out
    assert "classes     2: 0, 1" in printed and "40 documents" in printed and f"ready       {out}" in printed
    corpus = Corpus.open(out)
    assert texts_of(corpus, "training") == [line.split("\t")[0] for line in tsv.read_text().splitlines()[1:]]
    assert np.load(out / "training_labels.npy").tolist() == [n % 2 for n in range(40)]
    assert corpus.tokenizer.decode(corpus.validation.document(0)) == "an other film"
    assert np.load(out / "validation_labels.npy").tolist() == [1, 0]
    assert main(["verify", str(out)]) == 0
    before = (out / "meta.json").stat().st_mtime_ns
    assert labelled(f"{command} 290") == 0 and (out / "meta.json").stat().st_mtime_ns == before, "left alone"
    capsys.readouterr()
    assert labelled(f"{command} 291") == 2
    assert "holds another corpus (differs in tokenizer)" in capsys.readouterr().err


def test_held_out_by_the_hash_of_the_text(tsv, tmp_path, capsys):
    tsv.write_text(tsv.read_text() + tsv.read_text().partition("\n")[2])  # every sentence twice
    out = tmp_path / "out"
    assert labelled(f"--train {tsv} --validation_fraction 0.3 --tokenizer characters --out {out}") == 0
    corpus = Corpus.open(out)
    training, validation = set(texts_of(corpus, "training")), set(texts_of(corpus, "validation"))
    assert not training & validation and len(training | validation) == 40
    assert 4 <= len(validation) <= 20
    assert json.loads((out / "meta.json").read_text())["split"]["validation_fraction"] == 0.3


def test_fasta_has_a_token_for_each_letter(tmp_path, capsys):
    path = tmp_path / "variants.fasta"
    path.write_text(
        "".join(f">s{n} {'Alpha' if n % 3 else 'Beta'}\nACGTN\n{'AC' * (n + 1)}\n" for n in range(30))
    )
    assert labelled(f"--train {path} --out {tmp_path / 'dna'}") == 0
    tokenizer = load_tokenizer(tmp_path / "dna/tokenizer")
    assert tokenizer.vocab_size == 2 + 5 and tokenizer.name == "characters-7"
    assert tokenizer.decode(tokenizer.encode("GATTACA")) == "GATTACA"
    assert len(tokenizer.encode("ACGX")) == 4, "an unknown letter is one token"
    assert main(["inspect", str(tmp_path / "dna")]) == 0
    assert "classes     2: Alpha, Beta" in capsys.readouterr().out


def test_characters_are_those_of_any_text():
    tokenizer = character_tokenizer(["a\n b", "é\U0001f600"])
    assert tokenizer.vocab_size == 2 + 6
    assert tokenizer.decode(tokenizer.encode("b\u00e9 \U0001f600\na")) == "b\u00e9 \U0001f600\na"


def test_labels_are_kept_beside_their_texts(tmp_path):
    examples = [Example("a", "x"), Example("b", "y"), Example("a", "y")]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": e.text, "label": e.label}) + "\n" for e in examples))
    out = tmp_path / "out"
    assert labelled(f"--train {path} --validation {path} --tokenizer characters --out {out}") == 0
    assert np.load(out / "validation_labels.npy").tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out {out}", "required: --train"),
        ("--train {tsv}", "required: --out"),
        ("--train {tsv} --tokenizer x --train_tokenizer 300 --out {out}", "give either --tokenizer or"),
        ("--train {tsv} --train_tokenizer 5 --out {out}", "train_tokenizer: 5 is not valid; give 260 to"),
        ("--train {tsv} --validation {tsv} --validation_fraction 0.1 --out {out}", "validation: give either"),
        ("--train {tsv} --validation_fraction 1.5 --out {out}", "validation_fraction: 1.5 is"),
        (
            "--train {tsv} --validation {other} --out {out}",
            "the label 'great' occurs in validation, and never",
        ),
        ("--train {other} --validation {other} --out {out}", "have 1 different labels"),
        ("--train {tsv}.x --out {out}", "is of no known kind"),
        ("--train {tsv} --labels x", "--labels: unknown flag"),
        ("--train {tsv} --tokenizer /nowhere/x.model --out {out}", "tokenizer: '/nowhere/x.model'"),
        ("--train {tsv} --tokenizer characters --out {tsv}", "out: "),
    ],
)
def test_refusals(tsv, tmp_path, capsys, arguments, message):
    other = tmp_path / "other.tsv"
    other.write_text("sentence\tlabel\nso\tgreat\n")
    assert labelled(arguments.format(tsv=tsv, other=other, out=tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "out").exists()
