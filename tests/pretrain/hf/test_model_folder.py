"""Weights from elsewhere, in every damaged form, are one line for every command; links are followed."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrain.data.tokenizer import HuggingFaceTokenizer
from pretrain.generate import main
from pretrain.hf.formats import folder_shapes
from pretrain.hf.model_folder import KINDS, check_folder
from pretrain.hf.open_model import load_exported
from pretrain.hf.tokenizer_files import write_tokenizer
from tests.helpers.corpora import byte_level
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, network, relative, tokens
from tests.helpers.refusals import refusal, refused

SAFE, PICKLED = KINDS
NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return write_folder(network("uniform"), tmp_path / "hf", "llama")


def put(folder, kind, weights):
    """The weights as the folder's only file, of this kind."""
    (folder / SAFE).unlink(missing_ok=True)
    save = save_file if kind == SAFE else torch.save
    save(weights, folder / kind)


def changed(change):
    return lambda weights: weights | {NAME: change(weights[NAME])}


BAD = {
    "(int64), config.json": changed(torch.Tensor.long),
    "(float8_e4m3fn), config.json": changed(lambda weight: weight.to(torch.float8_e4m3fn)),
    "has shape []": changed(lambda weight: weight[0, 0].clone()),
    "has shape [0, 48]": changed(lambda weight: weight[:0].clone()),
    f"lacks {NAME}": lambda weights: {name: value for name, value in weights.items() if name != NAME},
    "has more, which": lambda weights: weights | {"more": torch.zeros(1)},
    "lm_head.weight in": lambda weights: weights | {"lm_head.weight": torch.zeros(260, 48)},
    f"{NAME} in": changed(lambda weight: weight.index_fill(0, torch.tensor([7]), torch.nan)),
    "is not finite": changed(lambda weight: weight - torch.inf),
}
MANY = torch.zeros(2 * 10**5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "change"), BAD.items())
def test_tensors_that_do_not_fit(folder, kind, words, change):
    put(folder, kind, change(load_file(folder / SAFE)))
    with refused(words, begins="model: "):
        load_exported(folder)


@pytest.mark.parametrize("content", [[MANY], {"model": {NAME: MANY}}, {1: MANY}])
def test_pickles_of_something_else(folder, content):
    put(folder, PICKLED, content)
    with refused("tensors by name", begins=f"model: {folder / PICKLED}"):
        load_exported(folder)


@pytest.mark.parametrize("other", [torch.Tensor.to_sparse, lambda weight: weight.to("meta")])
def test_a_pickled_tensor_of_another_layout_is_refused(folder, other):
    put(folder, PICKLED, changed(other)(load_file(folder / SAFE)))
    with refused(f"{NAME} in", "no dense tensor"):
        load_exported(folder)


NOT_FILES = {
    "is a pipe": os.mkfifo,
    "is a folder": os.mkdir,
    "is a device": lambda path: path.symlink_to("/dev/zero"),
    "holds no weights": lambda path: path.symlink_to(path),
    "cannot be loaded": lambda path: path.write_bytes(b"\xff" * 100),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("words", "make"), NOT_FILES.items())
def test_what_is_no_file_of_weights(folder, kind, words, make):
    (folder / SAFE).unlink()
    make(folder / kind)
    with refused(words if kind == SAFE or "loaded" not in words else "", begins="model: "):
        load_exported(folder)


PLACES = ("..", "/dev", "/proc/self", "b")
OUTSIDE = [{"a": f"{place}/model.{end}"} for place in PLACES for end in ("safetensors", "bin")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", ["x", {}, None, {"a": None}, {"a": ".."}, {"a": "x.json"}, *OUTSIDE])
def test_an_index_stays_in_the_folder(folder, kind, names):
    (folder / SAFE).unlink()
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": names}))
    with refused(*["which is no file of weights"] * (names in OUTSIDE), begins="model: "):
        check_folder(folder)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chosen", "name"), [("native", "prism"), ("llama", "uniform"), ("gpt2", "gpt2")])
def test_folders_of_links_in_parts_without_a_prefix(tmp_path, kind, chosen, name):
    """As Hugging Face's cache holds them, and as older versions of transformers have written them."""
    source, cache = write_folder(network(name), tmp_path / "source", chosen), tmp_path / "cache"
    weights = load_file(source / SAFE)
    assert {key: tuple(value.shape) for key, value in weights.items()} == folder_shapes(CONFIGS[name], chosen)
    bare = {key.removeprefix("model.").removeprefix("transformer."): value for key, value in weights.items()}
    if chosen == "gpt2":
        bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    parts = {f"part.{number}{Path(kind).suffix}": {} for number in range(3)}
    for number, (key, value) in enumerate(bare.items()):
        [*parts.values()][number % 3][key] = value
    (tmp_path / "blobs").mkdir()
    for part, held in parts.items():
        (save_file if kind == SAFE else torch.save)(held, tmp_path / "blobs" / part)
    index = {key: part for part, held in parts.items() for key in held}
    (tmp_path / "blobs" / f"{kind}.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(source / "config.json", tmp_path / "blobs")
    cache.mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (cache / path.name).symlink_to(os.path.relpath(path, cache))
    ids = tokens(2, 40)
    assert relative(load_exported(cache)(ids).logits, network(name)(ids)[..., :260]) < 1e-5


def test_generate_says_it_in_one_line(folder, capsys):
    write_tokenizer(HuggingFaceTokenizer(byte_level(260), "bytes"), folder, 64)
    assert main([str(folder), "--tokens", "3"]) == 0
    put(folder, SAFE, BAD["is not finite"](load_file(folder / SAFE)))
    assert "is not finite" in refusal(capsys, main, folder)
