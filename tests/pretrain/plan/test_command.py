"""The command: what it prints, what it refuses, and that what it offers is true."""

from __future__ import annotations

import json
import re

import pytest

from model.presets import preset
from pretrain.checkpoint.state import TrainingState
from pretrain.config.command_line import parse_command_line
from pretrain.data.meta import CorpusMeta
from pretrain.plan.command import main
from pretrain.prepare import command as prepare
from tests.helpers.refusals import refusal
from tests.helpers.small_corpus import SMALL_VOCABULARY, small_paths

BASE = ["--config", "757m", "--gpus_per_node", "8", "--ds_config", "ds_configs/zero2.json"]


def figures(capsys, *arguments: str) -> dict:
    assert main([*BASE, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_757m_on_two_nodes(capsys):
    found = figures(capsys, "--nodes", "2", "--micro_batch", "8", "--mfu", "0.5")
    assert found["recipe"] == "757m"
    assert found["machine"]["ranks"] == 16
    assert found["batch"] == {"sequences": 512, "micro_batch": 8, "accumulation": 4, "data_parallel": 16}
    assert found["tokens_per_step"] == 524_288 and found["tokens"] == 40_000 * 524_288
    assert found["memory_bytes"]["states"]["parameters"] == 2 * 756_819_456
    flops = 524_288 * preset("prism-757m").flops_per_token()
    assert found["flops_per_step"] == flops
    assert found["seconds_per_step"] == pytest.approx(flops / (0.5 * 989e12 * 16))
    assert found["sent_bytes_per_step"]["head_exchange"] == 0 and found["fits"]


def test_schedule_and_degree_show_in_the_exchange(capsys):
    found = figures(capsys, "--tensor_parallel", "4", "--micro_batch", "8")
    heads = "8x24"
    other = figures(capsys, "--tensor_parallel", "4", "--micro_batch", "8", "--heads", heads)
    assert found["sent_bytes_per_step"]["head_exchange"] > other["sent_bytes_per_step"]["head_exchange"] == 0
    assert found["batch"]["data_parallel"] == 2


def test_a_run_that_grows_is_planned_at_its_largest(capsys):
    growing = ("--growth.criterion", "incrt", "--growth.maximum", "24", "--growth.head_dim", "64")
    found = figures(capsys, "--micro_batch", "8", *growing)
    fixed = figures(capsys, *["--micro_batch", "8", "--heads", "24x24", "--architecture.head_dim", "64x24"])
    assert found["memory_bytes"] == fixed["memory_bytes"]
    assert found["flops_per_step"] == fixed["flops_per_step"]


def test_table_is_aligned_and_says_its_units(capsys):
    assert main([*BASE, "--activation_checkpointing", "true", "--tensor_parallel", "2", "--mfu", "0.4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r"  \S.* \d+\.\d{3}  ", line)]
    assert len(rows) >= 15
    assert len({re.search(r"\d\.\d{3}  ", row).end() for row in rows}) == 1
    text = "\n".join(lines)
    for part in ("predicted peak", "head exchange", "GPU-hours", "MFU of 0.4 of 989 TFLOP/s", "recomputed"):
        assert part in text


def test_fp32_has_no_known_peak(capsys):
    assert main([*BASE, "--precision", "fp32"]) == 0
    assert "no fp32 peak is known; give --peak_tflops" in capsys.readouterr().out
    assert figures(capsys, "--precision", "fp32", "--peak_tflops", "60", "--mfu", "0.4")["seconds"] > 0


def test_time_needs_a_measured_mfu_in_fp32(capsys):
    """The smallest step has a time of more than zero; without --mfu it is that of assumed values."""
    tiny = ["--model", "prism-nano", "--global_batch_tokens", "256", "--ds_config", "ds_configs/zero2.json"]
    for more in ([], ["--mfu", "0.4"], ["--precision", "fp32", "--peak_tflops", "60"]):
        assert main([*tiny, *more]) == 0
        text = capsys.readouterr().out
        found = re.search(r"time     (\S+) s a step", text)
        assert float(found[1]) > 0 if found else " hours at 0.3, " in text and "give --mfu" in text
        assert bool(found) == ("fp32" not in more)
        assert ("predicted from counted work and assumed" in text) == (not more)


def test_a_predicted_time_has_what_is_recomputed_in_it_and_needs_a_known_card(capsys):
    assert main([*BASE, "--activation_checkpointing", "true"]) == 0
    assert "MFU does not count what is recomputed" not in capsys.readouterr().out
    assert main([*BASE, "--peak_tflops", "362", "--gpu_memory", "79"]) == 0  # its bandwidth is not known
    text = capsys.readouterr().out
    assert "GPUs (another card, 79.0 GiB)" in text and " hours at 0.3, " in text and "h100" not in text
    assert main([*BASE, "--peak_tflops", "362"]) == 0
    assert "GPUs (h100, 79.1 GiB)" in capsys.readouterr().out


def test_what_would_fit_goes_with_the_run(capsys):
    for more, found in (([], True), (["--fused", "all"], False)):
        assert main([*BASE, "--gpus_per_node", "1", "--gpu_memory", "11", "--micro_batch", "1", *more]) == 2
        assert ("ds_configs/zero3_offload.json" in capsys.readouterr().err) == found


def test_the_corpus_gives_its_vocabulary_and_how_often_it_is_read(capsys, small_folder, tmp_path):
    corpora = CorpusMeta.read(small_folder).training.tokens
    plain = ["--config", "124m", "--data", f"{small_folder}:0.25,{small_folder}:0.75", "--steps", "100"]
    assert main(plain) == 0
    text = capsys.readouterr().out
    assert f"vocabulary {SMALL_VOCABULARY}" in text
    for weight in (0.25, 0.75):
        times = f"read {weight * 100 * 262_144 / corpora:,.0f} times"
        assert f"{small_folder}: {corpora:,} training tokens, {times}" in text
    assert main(["--config", "124m", "--data", str(small_folder), "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epochs"] == {str(small_folder): pytest.approx(3 * 262_144 / corpora)}
    (tmp_path / "empty").mkdir()
    assert main(["--config", "124m", "--data", str(tmp_path / "empty")]) == 2
    assert "has no meta.json" in capsys.readouterr().err
    assert main(["--config", "124m", "--data", str(tmp_path / "elsewhere")]) == 0
    text = capsys.readouterr().out
    assert "vocabulary 50,257" in text and "training tokens" not in text


def test_a_pair_is_read_with_its_tokenizer(capsys, small_folder):
    pair = ["--data", str(small_folder / "training"), "--tokenizer", str(small_folder / "tokenizer")]
    assert main(["--config", "124m", *pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["epochs"]) == [str(small_folder / "training")]
    assert found["parameters"] == preset("prism-124m").replace(vocab_size=SMALL_VOCABULARY).num_parameters()
    assert "which does not say its tokenizer" in refusal(capsys, main, "--config", "124m", *pair[:2])


def test_stages_and_degrees_are_compared(capsys):
    assert main([*BASE, "--micro_batch", "8", "--compare"]) == 0
    heading, *rows, usable = capsys.readouterr().out.splitlines()
    assert len(rows) == 12 and "t" in heading and "usable" in usable
    for row in rows:
        name, degree, c, micro_batch, accumulated, peak, sent, *_ = row.split()
        assert c == "1"
        plan = figures(capsys, "--ds_config", name, "--tensor_parallel", degree, "--micro_batch", "8")
        assert (int(micro_batch), int(accumulated)) == (8, plan["batch"]["accumulation"])
        assert float(peak) == pytest.approx(plan["memory_bytes"]["peak"] / 2**30, abs=0.006)
        parts = ("data_parallel", "gradients", "parameters", "tensor_all_reduces", "head_exchange", "muon")
        bytes_sent = sum(plan["sent_bytes_per_step"].get(part, 0) for part in parts)
        assert float(sent) == pytest.approx(bytes_sent / 1e9, abs=0.006)


def test_long_contexts_are_compared_with_shared_sequences(capsys):
    long = ["--config", "long-757m", "--gpus_per_node", "4", "--gpu", "h100"]
    assert main([*long, "--compare"]) == 0
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert len(rows) == 3 * len([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
    (row,) = [row.split() for row in rows if row.split()[:3] == ["zero3", "2", "2"]]
    assert (
        main([*long, "--ds_config", "zero3", "--tensor_parallel", "2", "--context_parallel", "2", "--json"])
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert float(row[5]) == pytest.approx(plan["memory_bytes"]["peak"] / 2**30, abs=0.006)


def test_corpora_of_two_tokenizers_of_one_size(capsys, small_folder, tmp_path):
    other = tmp_path / "other"
    texts = [str(path) for path in small_paths()[-3:]]
    size = str(SMALL_VOCABULARY)
    assert prepare.main(["--text", *texts, "--train_tokenizer", size, "--out", str(other)]) == 0
    both = f"{small_folder}:0.5,{other}:0.5"
    assert "other' has another tokenizer than" in refusal(capsys, main, *BASE, "--data", both)


def test_chosen_micro_batch_fits_and_grows_with_memory(capsys):
    small = figures(capsys, "--gpu_memory", "24")
    large = figures(capsys, "--gpu", "h200")
    assert small["batch"]["micro_batch"] < large["batch"]["micro_batch"]
    for found in (small, large):
        assert found["memory_bytes"]["peak"] <= found["machine"]["usable"]


@pytest.mark.parametrize(("ds_config", "memory"), [("zero1", "80"), ("zero2", "24"), ("zero3", "12")])
def test_what_is_offered_fits(capsys, ds_config: str, memory: str):
    asked = ["--ds_config", f"ds_configs/{ds_config}.json", "--micro_batch", "64", "--gpu_memory", memory]
    arguments = ["--config", "757m", "--gpus_per_node", "8", *asked]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: micro_batch: 64 sequences of 1024 tokens") and error.count("\n") == 1
    offers = error.strip().split("what would fit: ")[1].split("; or ")
    assert offers and all(offer.startswith("--") for offer in offers)
    for offer in offers:
        assert main([*arguments, *offer.split(" ")]) == 0, offer
        capsys.readouterr()


def test_ranks_share_sequences_as_offered(capsys):
    assert (
        main(["--config", "long-757m", "--gpus_per_node", "8", "--nodes", "8", "--context_parallel", "4"])
        == 0
    )
    assert "16 data-parallel" in capsys.readouterr().out


def test_weights_bring_their_vocabulary(capsys, tmp_path):
    """257 entries; the default recipe's data have 2,048."""
    model = preset("prism-nano").replace(vocab_size=257)
    write_checkpoint(tmp_path / "run", model)
    assert main(["--init_from", str(tmp_path / "run"), "--micro_batch", "1"]) == 0
    assert f"{model.num_parameters():,} parameters" in capsys.readouterr().out


def test_a_run_that_is_named_must_be_able_to_continue(capsys, tmp_path):
    model = preset("prism-nano").replace(vocab_size=257)
    write_checkpoint(tmp_path / "runs" / "mine", model)
    named = f"--config micro --model prism-nano --runs_dir {tmp_path}/runs --name mine".split()
    longer = ["--architecture.context_length", "128", "--global_batch_tokens", "1024"]
    assert main([*named, "--global_batch_tokens", "1024"]) == 0
    assert refusal(capsys, main, *named, *longer).startswith("error: resume: ")
    assert "context_length: 64 != 128" in refusal(capsys, main, *named, *longer)
    assert main([*named[:6], *longer]) == 0  # the plan of a run without a name


def write_checkpoint(folder, model) -> None:
    """What a plan reads of a run: its newest checkpoint's state."""
    checkpoint = folder / "checkpoints" / "step_000010"
    checkpoint.mkdir(parents=True)
    run = parse_command_line(["--config", "micro", "--model", "prism-nano"]).run
    state = TrainingState(step=10, run=run.to_dict(), model=model.to_json())
    (checkpoint / "state.json").write_text(state.to_json())
    (folder / "latest").write_text("step_000010\n")


def test_when_nothing_fits(capsys):
    assert main([*BASE, "--gpu_memory", "2"]) == 2
    assert "what would fit: more GPUs, or ones with more memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpu", "h10"],
            r"gpu: 'h10' is unknown; give one of .*h100, .* or --gpu_memory and",
        ),
        (["--nodes", "0"], r"nodes: 0 is not valid; give a positive number"),
        (["--nodes", "two"], r"--nodes: invalid int value: 'two'"),
        (["--mfu", "40"], r"mfu: 40.0 is not valid; give a positive number of at most 1"),
        (["--tensor_parallel", "3"], r"tensor_parallel: 3 does not divide the 8 ranks"),
        (["--model", "prism-757"], r"model: no preset 'prism-757'; did you mean"),
        (["--heads", "5x24"], r"heads: layer 0 has 5 heads, which do not divide d_model 1536"),
        (["--nodes", "3"], r"512 sequences .* 24 data-parallel ranks; valid numbers of ranks are"),
        (["--config", "long-757m", "--nodes", "8"], r"16 seq.* 64 data-.* sequence: --context_parallel 4$"),
        (["--config", "classification", "--nodes", "8"], r"32 sequences .* 64 .*_tokens 8192 or 16384$"),
        (["--schedule.kind", "wsd", "--schedule.decay", "1"], r"schedule.decay: 1.0 may mean one step or"),
        (["--llr.until", "1"], r"llr.until: 1.0 may mean one step or"),
        (["--micro_batch", "3"], r"micro_batch: 3 does not divide the 64 sequences"),
        (["--stesp", "3"], r"--stesp: unknown flag; did you mean '--steps'"),
        (["--print_config"], r"print_config: a plan does not do that; give --print_config to head-sch"),
        (["--compare", "--ds_config", "zero3_offload"], r"compare: it compares zero1, zero2 and zero3 as"),
        (["--compare", "--mfu", "0.4"], r"compare: it takes no --mfu; leave one of both out"),
        (["--ds_config", "none.json"], r"ds_config: cannot read 'none.json'"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main([*BASE, *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error
