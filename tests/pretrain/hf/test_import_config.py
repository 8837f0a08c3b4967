"""A config.json from elsewhere: what no machine holds is one line, before anything of that size is made."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.hf.import_folder import model_config
from tests.helpers.exports import write_folder
from tests.helpers.networks import network

SIZES = ["max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
SETTINGS = [*SIZES, "rope_parameters", "rope_theta", "layer_types", "per_layer_config", "hidden_act", "norm"]
NUMBERS = st.integers() | st.integers(10**5, 10**12) | st.floats()
LISTS = st.lists(st.integers() | st.none(), max_size=3)
MAPPINGS = st.dictionaries(
    st.sampled_from(["rope_theta", "rope_type", "0", "1"]), NUMBERS | st.text() | LISTS
)
VALUES = st.one_of(NUMBERS, st.text(), st.none(), st.booleans(), LISTS, MAPPINGS)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """config.json by model_type, and a folder to write one into."""
    root = tmp_path_factory.mktemp("exported")
    plain = write_folder(network("uniform"), root / "llama", "llama")
    folders = [plain, write_folder(network("prism"), root / "native")]
    (root / "edited").mkdir()
    return [json.loads((folder / "config.json").read_text()) for folder in folders], root / "edited"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(kind=st.integers(0, 1), name=st.sampled_from(SETTINGS), value=VALUES)
@example(0, "max_position_embeddings", 10**9)
@example(1, "max_position_embeddings", 2**31 - 1)
@example(1, "num_hidden_layers", 10**9)
@example(0, "hidden_size", 10**12)
def test_any_setting_is_taken_or_refused_in_one_line_at_once(configs, kind, name, value):
    (configs[1] / "config.json").write_text(json.dumps(configs[0][kind] | {name: value}))
    began = time.process_time()
    try:
        model, _ = model_config(configs[1])
        assert model.context_length < 10**9 and model.num_layers <= 10**4
    except UserError as error:
        assert "\n" not in str(error)
    assert time.process_time() - began < 5


def test_a_long_context_that_fits_comes_in(configs):
    config = configs[0][0] | {"max_position_embeddings": 131072}
    (configs[1] / "config.json").write_text(json.dumps(config))
    assert model_config(configs[1])[0].context_length == 131072
