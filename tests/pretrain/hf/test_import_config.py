"""A config.json from elsewhere: sizes that no machine holds are one line, before anything of that size is made."""

import json
import time

import pytest

from model.errors import UserError
from pretrain.hf.import_folder import model_config
from tests.helpers.networks import network, write_folder


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """config.json by model_type."""
    root = tmp_path_factory.mktemp("exported")
    folders = {
        "llama": write_folder(network("uniform"), root / "llama", "llama"),
        "head_schedule": write_folder(network("prism"), root / "native"),
    }
    return {name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()}


@pytest.mark.parametrize("kind", ["llama", "head_schedule"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("max_position_embeddings", 10**9), ("max_position_embeddings", 2**31 - 1), ("max_position_embeddings", 10**15),
     ("max_position_embeddings", 10**30), ("max_position_embeddings", -1), ("max_position_embeddings", "long"),
     ("num_hidden_layers", 10**9), ("num_hidden_layers", 0), ("num_hidden_layers", "x"), ("hidden_size", 10**12)],
)  # fmt: skip
def test_sizes_that_no_machine_holds(configs, tmp_path, kind, name, value):
    (tmp_path / "config.json").write_text(json.dumps(configs[kind] | {name: value}))
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        model_config(tmp_path)
    assert "\n" not in str(error.value) and time.monotonic() - began < 5


def test_a_long_context_that_fits_comes_in(configs, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs["llama"] | {"max_position_embeddings": 131072}))
    assert model_config(tmp_path)[0].context_length == 131072
