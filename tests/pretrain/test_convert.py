"""Runs trained by real ranks become Hugging Face folders that compute the same, or nothing is written."""

import contextlib
import dataclasses
import io
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from model.blocks import block
from model.config import ModelConfig
from model.sampling import make_cached_predictor, sample
from pretrain import convert, generate
from pretrain.data.corpus import Corpus
from pretrain.data.sequences import ValidationSequences
from pretrain.hf import export_folder
from pretrain.metrics.file import read_metrics
from pretrain.run.saved import SavedRun
from tests.helpers.corpora import contents
from tests.helpers.damage import damage
from tests.helpers.exports import failure, trained
from tests.helpers.networks import relative, tokens
from tests.pretrain.data.test_tokenizer_folders import byte_level, sentencepiece_with_a_prefix


@pytest.fixture(scope="module")
def runs(small_folder, tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def prism(small_folder, runs):
    """A Prism model trained by two ranks with ZeRO-3."""
    return trained(small_folder, runs, "prism").folder


@pytest.fixture(scope="module")
def native(prism, tmp_path_factory):
    """Its native export."""
    out = tmp_path_factory.mktemp("hf") / "prism"
    assert convert.main([str(prism), "--out", str(out)]) == 0
    return out


def test_the_folder_has_everything(native):
    names = {path.name for path in native.iterdir()}
    settings = {"README.md", "config.json", "generation_config.json"}
    code = {f"{part}_head_schedule.py" for part in ("configuration", "modeling", "rotary")}
    tokenizer = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"}
    assert names == {"model.safetensors", "export.json"} | settings | code | tokenizer
    card = (native / "README.md").read_text()
    for words in ("pipeline_tag: text-generation", "| heads | [2, 3, 4, 4] |", "| steps | 12 |", "small"):
        assert words in card
    assert json.loads((native / "config.json").read_text())["vocab_size"] == 600


def test_perplexity_equals_the_trainers_validation_loss(native, prism, small):
    check_perplexity(native, prism, small)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_zero3_runs(ranks, small_folder, runs, small, tmp_path, capsys):
    """Two tensor-parallel ranks, alone or twice, with ZeRO-3: three heads are shared by two ranks."""
    run = trained(small_folder, runs, f"tp_{ranks}", "--tensor_parallel", "2", ranks=ranks).folder
    assert convert.main([str(run), "--out", str(tmp_path / "hf")]) == 0
    check_perplexity(tmp_path / "hf", run, small)
    capsys.readouterr()
    for folder in (run, tmp_path / "hf"):
        assert generate.main([str(folder), "--prompt", "def ", "--tokens", "20"]) == 0
    first, second = capsys.readouterr().out.split("def ")[1:]
    assert first == second


def check_perplexity(native, prism, small):
    """1e-3 nats: the trainer's last validation is of these weights on these windows; only sums differ."""
    windows = ValidationSequences(small, 64, 10)
    batch = torch.from_numpy(windows.batch(0, len(windows)))
    model = AutoModelForCausalLM.from_pretrained(native, trust_remote_code=True).eval()
    with torch.no_grad():
        loss = model(batch, labels=batch).loss.item()
    expected = [row["val_loss"] for row in read_metrics(prism) if "val_loss" in row][-1]
    assert loss == pytest.approx(expected, abs=1e-3)
    assert math.exp(loss) == pytest.approx(math.exp(expected), rel=1e-3)


@pytest.fixture(scope="module")
def llama_export(prism, tmp_path_factory):
    """The same run's padded Llama folder, and what was printed."""
    out, printed = tmp_path_factory.mktemp("hf") / "llama", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert convert.main([str(prism), "--out", str(out), "--format", "llama"]) == 0
    return out, printed.getvalue()


@pytest.fixture
def llama(llama_export, tmp_path):
    """A copy of that folder, to be edited."""
    return shutil.copytree(llama_export[0], tmp_path / "llama")


def test_llama_format_needs_no_remote_code(prism, llama_export):
    out, printed = llama_export
    assert "padded to 4 heads" in printed and "no remote code" in printed
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    ids = AutoTokenizer.from_pretrained(out, trust_remote_code=False).encode("x = 1")
    assert ids == SavedRun.open(prism).tokenizer.encode("x = 1")


@pytest.mark.slow
def test_gpt2_runs_become_plain_gpt2_and_come_back(small_folder, runs, tmp_path):
    run = trained(small_folder, runs, "gpt2", "--model", "gpt2-nano", ranks=1, stage=1)
    out = tmp_path / "gpt2"
    assert convert.main([str(run.folder), "--out", str(out)]) == 0
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out)
    model.transformer.save_pretrained(tmp_path / "bare")  # names without a prefix, as in OpenAI's own folder
    shutil.copy(out / "tokenizer.model", tmp_path / "bare")
    for number, folder in enumerate((out, tmp_path / "bare")):
        back = tmp_path / "runs" / f"back{number}"
        assert convert.main(["--from_hf", str(folder), "--out", str(back)]) == 0
        same_weights(run.folder, back)


def edit_json(name, **changes):
    def edit(folder):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return edit


SWITCHES = {"rope_theta": 5e4, "rms_norm_eps": 1e-6, "initializer_range": 0.2}


def of_transformers(folder, kind, tied, safe, vocab_size=300):
    """A Llama or Qwen3 made and saved by transformers, with grouped queries."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
    }
    layers = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
    more = {"head_dim": 12} if kind is Qwen3ForCausalLM else {}
    config = kind.config_class(**sizes, **layers, **SWITCHES, **more, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # which transformers begins with 1
                weight.uniform_(0.5, 1.5)
    if safe:
        model.save_pretrained(folder, max_shard_size="100KB")  # several files and an index
    else:
        config.save_pretrained(folder)
        edit_json("config.json", architectures=[kind.__name__])(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
@pytest.mark.parametrize(("tied", "safe"), [(False, True), (True, False)], ids=["untied", "tied-bin"])
def test_a_plain_folder_of_transformers_comes_in(tied, safe, kind, tmp_path):
    """With a byte-level tokenizer of as many entries."""
    folder, back = tmp_path / "plain", tmp_path / "runs" / "back"
    folder.mkdir()
    theirs = of_transformers(folder, kind, tied, safe)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(300), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    assert convert.main(["--from_hf", str(folder), "--out", str(back)]) == 0
    run = SavedRun.open(back)
    sizes = {"vocab_size": 300, "context_length": 64, "d_model": 48, "ffn_width": 80}
    switches = {"rope_base": 5e4, "norm_eps": 1e-6, "tie_embeddings": tied, "init_std": 0.2}
    heads = {"heads": (6, 6), "kv_heads": (3, 3)}
    heads |= {"head_dim": (12, 12)} if kind is Qwen3ForCausalLM else {}
    assert run.model == block(theirs.config.model_type, **sizes, **switches, **heads)
    ids = tokens(2, 64)
    with torch.no_grad():
        assert relative(run.load_model()(ids)[..., :300], theirs(ids).logits) <= 1e-5
    text = "12 bottles stand"
    assert run.tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder).encode(text)


def same_weights(one, other):
    first, second = SavedRun.open(one), SavedRun.open(other)
    assert first.model == second.model
    for name in first.checkpoint.names():
        assert torch.equal(first.checkpoint.parameter(name), second.checkpoint.parameter(name)), name


def test_native_comes_back_bit_equal_and_goes_out_again(native, prism, tmp_path):
    back, again = tmp_path / "runs" / "back", tmp_path / "again"
    assert convert.main(["--from_hf", str(native), "--out", str(back)]) == 0
    same_weights(prism, back)
    assert convert.main([str(back), "--out", str(again)]) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (native / name).read_bytes()


def test_an_imported_run_continues(native, small_folder, tmp_path, capsys):
    """Training goes on from the imported weights: the first loss is near the last, not that of a new model.

    transformers has written the tokenizer anew, so that its files are no longer those of the corpus.
    """
    back, folder = tmp_path / "runs" / "back", tmp_path / "hf"
    shutil.copytree(native, folder)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    capsys.readouterr()
    assert convert.main(["--from_hf", str(folder), "--out", str(back)]) == 0
    assert (
        "lack what the folder has besides: the chat template, all but one of its 2 end"
        in capsys.readouterr().out
    )
    more = ["--model", str(back / "model.json"), "--steps", "2", "--logging.every", "1"]
    run = trained(small_folder, back.parent, "back", *more, ranks=1, stage=2)
    rows = read_metrics(run.folder)
    assert rows[0]["train_loss"] < math.log(600) - 0.1
    assert SavedRun.open(run.folder).state.step == 2  # its tokenizer's files are those that its hash names


@pytest.mark.slow
def test_a_plain_folder_is_trained_further_and_goes_out_again(native, small_folder, tmp_path):
    """Two steps, alone and by two tensor-parallel ranks that share the middle one of three key/value heads;
    1e-6 of the loss, as for every degree."""
    folder, out, losses = tmp_path / "plain", tmp_path / "out", []
    folder.mkdir()
    theirs = of_transformers(folder, Qwen3ForCausalLM, False, True, vocab_size=600)
    AutoTokenizer.from_pretrained(native, trust_remote_code=True).save_pretrained(folder)
    for ranks in (1, 2):
        run = tmp_path / "runs" / f"run{ranks}"
        assert convert.main(["--from_hf", str(folder), "--out", str(run)]) == 0
        more = ["--model", str(run / "model.json"), "--steps", "2", "--logging.every", "1"]
        more += ["--tensor_parallel", str(ranks), "--precision", "fp32"]
        run = trained(small_folder, run.parent, run.name, *more, ranks=ranks, stage=1).folder
        losses.append([row["train_loss"] for row in read_metrics(run)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[0]) == 2
    assert convert.main([str(run), "--out", str(out)]) == 0
    again, ours = AutoModelForCausalLM.from_pretrained(out).eval(), SavedRun.open(run).load_model()
    assert type(again) is Qwen3ForCausalLM and type(ours) is not Qwen3ForCausalLM
    ids = tokens(2, 64)
    with torch.no_grad():
        logits = again(ids).logits
        assert relative(ours(ids)[..., :600], logits) <= 1e-5
        assert 1e-3 < relative(theirs(ids).logits, logits) < 0.5  # it has learned something, from there on
    written = again.generate(ids[:1, :7], max_new_tokens=40, do_sample=False, eos_token_id=-1)
    assert written[0, 7:].tolist() == list(
        sample(make_cached_predictor(ours), ids[0, :7].tolist(), 40, 0, 1, 0)
    )


@pytest.mark.slow
def test_bf16_states_its_bound(prism, tmp_path, capsys):
    out = tmp_path / "bf16"
    assert convert.main([str(prism), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert "bound 5e-02" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).dtype == torch.bfloat16


def test_an_export_that_computes_something_else_leaves_nothing(prism, tmp_path, capsys, monkeypatch):
    original = export_folder.list_parameters

    def wrong(network):
        return {
            name: weight * (1.1 if name.endswith(".v.weight") else 1)
            for name, weight in original(network).items()
        }

    monkeypatch.setattr(export_folder, "list_parameters", wrong)
    assert "logits differ by" in failure(capsys, prism, "--out", tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def changed(name):
    return lambda folder: (folder / name).write_text("mine")


def linked(folder):
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")


KEPT = {
    "'thesis.tex' in it was not written by the export": changed("thesis.tex"),
    "'mine' in it was not written by the export": lambda folder: (folder / "mine").mkdir(),
    "'README.md' in it was changed since the export": changed("README.md"),
    "'model.safetensors' in it was changed": lambda folder: damage(folder / "model.safetensors", "flipped"),
    "'config.json' in it was changed": linked,
    "but no export.json": lambda folder: (folder / "export.json").unlink(),
    "export.json is not valid JSON": changed("export.json"),
}


@pytest.mark.parametrize(("words", "change"), KEPT.items())
def test_what_an_export_did_not_write_is_kept(words, change, native, prism, tmp_path, capsys):
    out = shutil.copytree(native, tmp_path / "hf")
    assert "exists already" in failure(capsys, prism, "--out", out)
    change(out)
    before = contents(out)
    assert words in failure(capsys, prism, "--out", out, "--overwrite")
    assert contents(out) == before


def test_what_is_added_while_an_export_runs_is_kept(native, prism, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(native, tmp_path / "hf")
    monkeypatch.setattr(export_folder, "list_files", lambda folder: changed("thesis.tex")(out))
    assert "'thesis.tex' in it" in failure(capsys, prism, "--out", out, "--overwrite")
    assert (out / "thesis.tex").is_file() and [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_is_replaced_where_the_user_asks(native, prism, tmp_path):
    """Also through a link, and where files of it have been deleted."""
    out, link = shutil.copytree(native, tmp_path / "hf"), tmp_path / "link"
    link.symlink_to(out)
    (out / "README.md").unlink()
    assert convert.main([str(prism), "--out", str(link), "--overwrite", "--license", "mit"]) == 0
    assert link.is_symlink() and "license: mit" in (out / "README.md").read_text()


OUT = {
    "": "'' is empty",
    "/": "names no folder",
    ".": "exists already",
    "~": "exists already",
    "file": "exists already",
    "loop": "names no folder",
    "/proc/hf": "cannot write",
    "{run}": "is the folder of a run, not of",
    "{run}/checkpoints/hf": "is among the run's checkpoints",
    "x" * 300: "File name too long",
    "a\0b": "names no folder",
}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["new", "overwrite"])
@pytest.mark.parametrize("out", OUT)
def test_places_that_cannot_be_written_are_refused(out, overwrite, prism, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    line = failure(capsys, prism, "--out", out.format(run=prism), *overwrite)
    folder = overwrite and out != "file"
    assert (OUT[out].replace("exists already", "is not replaced") if folder else OUT[out]) in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_full_disk(prism, tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(export_folder, "write_weights", full)
    assert "No space left on device" in failure(capsys, prism, "--out", tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoints(prism, tmp_path, capsys):
    run = shutil.copytree(prism, tmp_path / "run")
    newest = run / "checkpoints" / "step_000012" / "weights_and_optimizer"
    (newest / "rank_00000.safetensors").unlink()
    assert "is missing" in failure(capsys, run, "--out", tmp_path / "hf", "--step", "12")
    assert convert.main([str(run), "--out", str(tmp_path / "hf")]) == 0  # falls back, and says so
    assert "step_000012 is damaged" in capsys.readouterr().out
    for step in (run / "checkpoints").iterdir():
        (step / "state.json").write_text("{")
    assert "none that is whole" in failure(capsys, run, "--out", tmp_path / "hf2")


def test_a_tokenizer_that_does_not_match(prism, tmp_path, capsys, monkeypatch):
    from pretrain.data.tokenizer import SentencePieceTokenizer
    from pretrain.run import saved as run_source

    other = SentencePieceTokenizer.train(["another text, " * 200 + "with other pieces"], 280)
    monkeypatch.setattr(run_source, "load_tokenizer", lambda folder: other)
    assert "is not the one that the run was trained with" in failure(capsys, prism, "--out", tmp_path / "hf")


REFUSED = {
    "--out x": "run: give the folder of a run, such as runs/NAME, or --from_hf DIR, and not both",
    "nowhere --out x": "is not a run's folder",
    "{tmp} --out x": "is not a run's folder",
    "{run}": "required: --out",
    "{run} --out x --step 7": "no checkpoint of step 7",
    "{run} --out x --format onnx": "format: 'onnx' is not valid; give one of auto, native, llama, qwen3",
    "{run} --from_hf {tmp} --out x": "and not both",
    "--from_hf {tmp} --out x": "has no config.json",
    "--from_hf {tmp} --out x --step 3": "step: is for converting a run; leave it out with --from_hf",
    "--from_hf {tmp} --out x --dtype bfloat16": "dtype: is for converting a run",
    "--from_hf {tmp} --out x --overwrite": "overwrite: is for converting a run",
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.items())
def test_bad_input_is_one_line(arguments, words, prism, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    filled = [text.format(run=prism, tmp=tmp_path / "empty") for text in arguments.split()]
    assert words in failure(capsys, *filled)
    assert not (tmp_path / "x").exists()


FOREIGN = {
    "hidden_act: 'relu' is not valid": {"hidden_act": "relu"},
    "lacks model.layers.4": {"num_hidden_layers": 5},
}


@pytest.mark.parametrize(("words", "change"), FOREIGN.items())
def test_folders_that_cannot_come_in(change, words, llama, tmp_path, capsys):
    edit_json("config.json", **change)(llama)
    assert words in failure(capsys, "--from_hf", llama, "--out", tmp_path / "runs" / "back")
    assert not (tmp_path / "runs" / "back").exists()


def test_a_tokenizer_that_could_not_go_out_again_does_not_come_in(llama, tmp_path, capsys):
    (llama / "tokenizer.json").unlink()
    (llama / "tokenizer.model").write_bytes(sentencepiece_with_a_prefix())
    assert "changes its text" in failure(capsys, "--from_hf", llama, "--out", tmp_path / "runs" / "back")
    assert not (tmp_path / "runs" / "back").exists()


def test_pickles_are_read_without_running_them(llama, tmp_path, capsys):
    """pytorch_model.bin comes in through weights_only; one that would run code is refused."""
    (llama / "model.safetensors").unlink()

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    weights = {"model.embed_tokens.weight": Evil(), "padding": torch.zeros(300_000)}
    torch.save(weights, llama / "pytorch_model.bin")
    assert "cannot be loaded" in failure(capsys, "--from_hf", llama, "--out", tmp_path / "runs" / "back")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_other_libraries_stay_out_of_a_typing_error():
    """A mistyped flag is answered without loading torch, DeepSpeed or transformers."""
    code = (
        "import sys; from pretrain import convert, generate\n"
        "from pretrain.evaluation import command as evaluation\n"
        "for command in (convert, evaluation): assert command.main(['run', '--tyop']) == 2\n"
        "assert not {'transformers', 'deepspeed', 'lm_eval', 'wandb', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_real_tokens_fall_back_to_the_standard_library(prism, tmp_path):
    run = shutil.copytree(prism, tmp_path / "run")
    source = SavedRun.open(run)
    held_out, name = source.real_tokens(3, 64)
    assert "held-out text of small" in name and held_out.shape == (3, 64)
    short, name = source.real_tokens(1, 100_000)  # the held-out text is less than that
    assert "standard library" in name and short.shape == (1, 100_000)
    (corpus,) = source.corpora()
    pair = dataclasses.replace(source, tokenizer=corpus.tokenizer)
    pair.state.run["data"] = str(corpus.folder / "training")  # a .bin/.idx pair does not say its tokenizer
    whole = Corpus.open(corpus.folder / "training", corpus.tokenizer)
    pair.state.data.data[:] = [(whole.meta.content_hash, "1")]
    assert [found.folder for found in pair.corpora()] == [corpus.folder / "training"]
    source.state.run["data"] = str(tmp_path / "gone")
    elsewhere, name = source.real_tokens(3, 64)
    assert "standard library" in name and elsewhere.shape == (3, 64) and elsewhere.dtype == np.int64
    assert ModelConfig.from_json(source.state.model) == source.model
