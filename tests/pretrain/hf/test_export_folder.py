"""Files that the safetensors library reads back to the bit, in every dtype."""

import pytest
import torch
from safetensors.torch import load_file

from model.errors import UserError
from pretrain.hf.export_folder import list_parameters, write_weights
from pretrain.hf.formats import folder_weights
from tests.helpers.networks import network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_written_to_the_bit(dtype, tmp_path):
    ours = network("prism")
    weights = folder_weights(ours.config, "native", list_parameters(ours))
    expected = {name: weight.to(dtype) for name, weight in weights.items()}
    write_weights(tmp_path, weights, dtype)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())


def test_weights_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"layers\.1\.q is not finite in torch\.float16"):
        write_weights(tmp_path, {"layers.1.q": torch.tensor([1e6])}, torch.float16)
