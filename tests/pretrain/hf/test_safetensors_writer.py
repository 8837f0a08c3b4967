"""Files that the safetensors library reads back to the bit, in one piece or in several."""

import json

import pytest
import torch
from safetensors.torch import load_file

from model.errors import UserError
from pretrain.hf.safetensors_writer import total_bytes, write_weights
from tests.helpers.exports import export_of, weights_of
from tests.helpers.networks import network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file(dtype, tmp_path):
    ours = network("prism")
    tensors = export_of(ours).tensors
    assert write_weights(tmp_path, tensors, weights_of(ours), dtype) == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert set(read) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        assert torch.equal(read[tensor.name], weights_of(ours)(tensor.sources[0]).to(dtype))
    assert total_bytes(tensors, dtype) == sum(tensor.nbytes for tensor in read.values())


def test_several_files_with_an_index(tmp_path):
    ours = network("prism")
    tensors = export_of(ours).tensors
    names = write_weights(tmp_path, tensors, weights_of(ours), torch.float32, shard_bytes=100_000)
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert index["metadata"]["total_size"] == total_bytes(tensors, torch.float32)
    assert all((tmp_path / name).stat().st_size < 110_000 for name in names)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    ours = network("prism")
    with torch.no_grad():
        ours.layers[1].attention.q.weight[0, 0] = 1e6
    with pytest.raises(UserError, match=r"layers\.1\.attention\.q\.weight are not finite in float16"):
        write_weights(tmp_path, export_of(ours).tensors, weights_of(ours), torch.float16)
