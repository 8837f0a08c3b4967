"""The LM head of a native export is a plain linear layer: what tools do with one changes no logits.

peft and TRL are not among the pinned packages: their tests are skipped where they are not installed.
"""

import importlib
import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from pretrain import convert
from pretrain.hf.formats import folder_config
from pretrain.hf.modeling_head_schedule import HeadScheduleForCausalLM
from pretrain.run.saved import SavedRun
from tests.helpers.corpora import byte_level
from tests.helpers.exports import failure, write_folder
from tests.helpers.marks import slow
from tests.helpers.networks import CONFIGS, network, relative, tokens

SCALE = {"attention_scale": "constant", "attention_scale_base": 12}  # 1/sqrt(d_h), as a Llama has it
MUP = {"parametrization": "mup", "base_width": 32, **SCALE}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"logit_softcap": 4.0},
    "mup": MUP,
    "both": {"logit_softcap": 4.0, **MUP},
}
CASES = [(head, tied) for head in HEADS for tied in (True, False)]
IDS = tokens(2, 40)


def described(head, tied, **more):
    """48 wide with heads of dim 12 in each of three layers, and the options of the LM head."""
    return CONFIGS["uniform"].replace(tie_embeddings=tied, **HEADS[head] | more)


@pytest.fixture(scope="module", params=CASES, ids=[f"{head}-{'un' * (not tied)}tied" for head, tied in CASES])
def case(request, tmp_path_factory):
    """An exported folder, its head's options, and whether its embeddings are tied."""
    head, tied = request.param
    return write_folder(network(described(head, tied)), tmp_path_factory.mktemp("head")), head, tied


def load(folder):
    return HeadScheduleForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits_of(model, ids=IDS, **options):
    return model(ids, **options).logits


def test_config_and_logits(case):
    folder, head, tied = case
    model, written = load(folder), json.loads((folder / "config.json").read_text())
    assert type(model.lm_head) is torch.nn.Linear
    assert written["logit_scale"] == pytest.approx(32 / 48 if head in ("mup", "both") else 1)
    assert written["final_logit_softcapping"] == HEADS[head].get("logit_softcap")
    with torch.no_grad():
        assert relative(logits_of(model), network(described(head, tied))(IDS)) <= 1e-5
        # The ecosystem's meaning of both names: a factor on the logits, then the cap.
        expected = model.lm_head(model.model(IDS).last_hidden_state) * written["logit_scale"]
        if (cap := written["final_logit_softcapping"]) is not None:
            expected = cap * torch.tanh(expected / cap)
    assert relative(logits_of(model), expected) <= 1e-5


def test_resized_and_saved(case, tmp_path):
    model = load(case[0])
    before = logits_of(model)
    model.resize_token_embeddings(268)
    resized = logits_of(model)
    assert resized.shape[-1] == 268 and relative(resized[..., :260], before) <= 1e-5
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(load(tmp_path)), resized)


def test_left_padded_batches_equal_single_ones(case):
    model, long, short = load(case[0]), tokens(1, 20, seed=4), tokens(1, 12, seed=5)
    padded = torch.cat([long, torch.cat([torch.ones(1, 8, dtype=torch.int64), short], 1)])
    mask = torch.ones_like(padded)
    mask[1, :8] = 0
    batch = logits_of(model, padded, attention_mask=mask)
    assert relative(batch[0], logits_of(model, long)[0]) <= 1e-5
    assert relative(batch[1, 8:], logits_of(model, short)[0]) <= 1e-5


def adapted(model):
    """The model with LoRA on its LM head and queries, with weights far from zero."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=4, init_lora_weights=False)
    return peft.get_peft_model(model, options).eval()


def test_lora_merged_and_saved(case, tmp_path):
    """A merge into a tied LM head changes the embedding in every model: as in a tied Llama there."""
    folder, head, tied = case
    with_adapter = adapted(load(folder))
    apart = logits_of(with_adapter)
    merged = with_adapter.merge_and_unload()
    assert relative(apart, logits_of(load(folder))) > 1e-2
    if tied:
        llama = LlamaForCausalLM(folder_config(described("plain", True), "llama", {}))
        llama.load_state_dict(load(folder).state_dict())
        llama = adapted(llama.eval()).merge_and_unload()
        apart = logits_of(llama) * (32 / 48 if head in ("mup", "both") else 1)
        if (cap := HEADS[head].get("logit_softcap")) is not None:
            apart = cap * torch.tanh(apart / cap)
        assert torch.equal(llama.model.embed_tokens.weight, merged.model.embed_tokens.weight)
    assert relative(logits_of(merged), apart) <= 1e-5
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(load(tmp_path / "merged")), logits_of(merged))


def test_trls_fused_loss_is_the_models(case):
    pytest.importorskip("trl")
    model = load(case[0])
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(model)
    with torch.no_grad():
        fused, plain = model(IDS, labels=IDS, fused_lm_head=True), model(IDS, labels=IDS)
    assert fused.loss.item() == pytest.approx(plain.loss.item(), rel=1e-5)


def test_kept_positions(case):
    model = load(case[0])
    whole, places = logits_of(model), torch.tensor([[0, 7], [3, 39]])
    mask = torch.zeros(2, 40, dtype=torch.bool).scatter(1, places, True)
    each = torch.stack([row[kept] for row, kept in zip(whole, places, strict=True)])
    expected = [
        (2, whole[:, -2:]),
        (places[0], whole[:, places[0]]),
        (places, each),
        (mask, each.flatten(0, 1)),
    ]
    for kept, logits in expected:
        assert relative(logits_of(model, logits_to_keep=kept), logits) <= 1e-5


# ---------------------------------------------------------------------- convert --fold


def imported(tmp_path, *case, **more):
    """A run of step 0 of a model with these options."""
    model = described(*case, vocab_size=300, **more)
    folder, run = write_folder(network(model), tmp_path / "folder"), tmp_path / "runs" / "run"
    PreTrainedTokenizerFast(tokenizer_object=byte_level(300), eos_token="<|endoftext|>").save_pretrained(
        folder
    )
    assert convert.main(["--from_hf", str(folder), "--out", str(run)]) == 0
    assert SavedRun.open(run).model == model
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("base", "words"), [(24, "exact"), *slow([(32, "rounded")])])
@pytest.mark.parametrize("tied", [False, *slow([True])])
def test_a_folded_divisor(tied, base, words, tmp_path, capsys):
    run = imported(tmp_path, "both", tied, base_width=base)
    out, plain = tmp_path / "out", tmp_path / "plain"
    assert convert.main([str(run), "--out", str(plain)]) == 0
    assert "vLLM caps first" in capsys.readouterr().out
    assert convert.main([str(run), "--out", str(out), "--fold"]) == 0
    printed = capsys.readouterr().out
    assert f"divided by {48 / base:g} ({words}" in printed.replace("each weight is ", "")
    assert "final_logit_softcapping" in printed and "vLLM" not in printed
    written = json.loads((out / "config.json").read_text())
    assert (written["logit_scale"], written["parametrization"], written["base_width"]) == (
        1,
        "standard",
        None,
    )
    folded, whole = (
        AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval() for path in (out, plain)
    )
    difference = relative(logits_of(folded), logits_of(whole))
    assert difference == 0 if base == 24 else difference <= 1e-5
    card = (out / "README.md").read_text()
    assert "| parametrization | standard |" in card and f"| trained as | mup, base width {base}, " in card


@pytest.mark.slow
def test_a_plain_format_holds_the_divisor(tmp_path, capsys):
    changes = {"heads": (2, 4, 1), "qk_norm": "weighted", "attention_scale": "head_dim"}
    run, out, native = imported(tmp_path, "mup", True, **changes), tmp_path / "out", tmp_path / "native"
    assert convert.main([str(run), "--out", str(native)]) == 0
    assert "note     --format qwen3 writes a model without remote code, of " in capsys.readouterr().out
    assert convert.main([str(run), "--out", str(out), "--format", "qwen3"]) == 0
    printed = capsys.readouterr().out
    assert "the final norm's weights are divided by 1.5" in printed
    assert "out: Qwen3ForCausalLM; no remote code" in printed and "logit_scale" not in printed
    size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(out).parameters())
    assert f": {size:,} parameters, " in printed


def test_without_a_divisor_there_is_nothing_to_fold(tmp_path, capsys):
    run = imported(tmp_path, "cap", False)
    assert "fold: this model's logits have no divisor" in failure(
        capsys, run, "--out", tmp_path / "out", "--fold"
    )
    assert not (tmp_path / "out").exists()


def test_folding_is_for_exports(tmp_path, capsys):
    assert "fold: is for" in failure(capsys, "--from_hf", tmp_path, "--out", tmp_path / "out", "--fold")
