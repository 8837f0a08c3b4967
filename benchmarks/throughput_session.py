"""One contender of benchmarks/throughput.py: trains as many steps as each line of its input asks for.

Not for use by hand. It reads a request as JSON from its command line, makes a first step, says that it is
ready, and answers every number of steps on its input with the seconds of a step, the loss and its memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.helpers import command_line_of, process_memory, wait  # noqa: E402

Request = dict[str, Any]
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIPPING = 3e-4, (0.9, 0.95), 0.1, 1.0


def answer(**results: Any) -> None:
    """Print a line that the parent waits for."""
    print(json.dumps({"throughput": results}), flush=True)


class Turns:
    """Counts steps, and waits for the parent when those of a turn are done. Call it after every step."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.device, self.tokens = device, tokens
        self.imported = process_memory("VmRSS")
        self.left, self.steps, self.began = 1, 0, 0.0

    def __call__(self, loss: Callable[[], float]) -> None:
        """A step has been asked for."""
        self.left -= 1
        if self.left:
            return
        wait()
        now = time.perf_counter()
        if not self.steps:
            answer(at=time.time(), device=self.device.type)
        else:
            cuda = self.device.type == "cuda"
            peak = torch.cuda.max_memory_allocated() if cuda else process_memory("VmHWM") - self.imported
            answer(seconds=(now - self.began) / self.steps, tokens=self.tokens, peak_bytes=peak, loss=loss())
        self.wait()

    def wait(self) -> None:
        """Wait for the next number of steps; the process ends with its input."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        self.left = self.steps = int(line)
        self.began = time.perf_counter()


def train_ours(request: Request) -> None:
    """The trainer of pretrain/main.py, with a hook that keeps it waiting."""
    from pretrain.engine.deepspeed_logging import quiet_deepspeed
    from pretrain.engine.ds_config_check import read_ds_config

    quiet_deepspeed()
    from pretrain.assembly.open_run import open_run
    from pretrain.run.hooks import Hook, HookResult
    from pretrain.run.session import Session
    from pretrain.runtime.signals import StopListener
    from pretrain.trainer import Trainer

    with tempfile.TemporaryDirectory() as own:
        folder = request.get("folder", own)  # several ranks share one, in which the model is already
        model = Path(folder) / "model.json"
        if folder == own:
            model.write_text(json.dumps(request["model"]))
        values = {
            "ds_config": "ds_configs/zero2.json",
            "model": model,
            "data_root": request["data_root"],
            "vocab_size": request["model"]["vocab_size"],
            "micro_batch": request["micro_batch"],
            "global_batch_tokens": request["micro_batch"] * request["model"]["context_length"],
            "steps": 1_000_000,
            "precision": request["precision"],
            "validation.every": 0,
            "diagnostics_every": 0,
            "checkpoint.every": 0,
            "logging.wandb": "disabled",
            "runs_dir": folder,
            "compile": str(request["compile"]).lower(),
        }
        flags = [f"--{name}={value}" for name, value in values.items()]
        command = command_line_of(*flags, *request["flags"])
        listener = StopListener()

        class Pacer(Hook):
            name = "pacer"

            def __init__(self, session: Session) -> None:
                self.session, self.turns = session, Turns(session.world.device, session.tokens_per_step)

            def before_step(self, engine: Any, state: Any) -> HookResult:
                if state.step:
                    self.turns(self.last_loss)
                return HookResult()

            def last_loss(self) -> float:
                assert isinstance(trainer, Trainer)
                trainer.log.flush()
                if not self.session.world.is_main:  # which alone writes metrics
                    return math.nan
                rows = (self.session.run.folder / "metrics.jsonl").read_text().splitlines()
                return float(json.loads(rows[-1])["train_loss"])

        with open_run(command.run, read_ds_config(command.ds_config), listener, [Pacer]) as trainer:
            assert isinstance(trainer, Trainer)
            trainer.fit()


def batches(request: Request, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows of the built-in corpus, one after another: inputs and the tokens that follow them."""
    from pretrain.data.corpus import Corpus
    from pretrain.prepare.builtin import prepare_builtin

    corpus = Corpus.open(prepare_builtin(request["data_root"], request["model"]["vocab_size"]))
    length, rows = request["model"]["context_length"], request["micro_batch"]
    text = torch.cat(
        [
            torch.from_numpy(corpus.training.document(number).astype("int64"))
            for number in range(min(500, corpus.training.num_documents))
        ]
    )
    step = rows * length
    while True:
        for start in range(0, len(text) - step - 1, step):
            window = text[start : start + step + 1]
            tokens, targets = window[:-1].view(rows, length), window[1:].view(rows, length)
            if device.type == "cuda":
                tokens = tokens.pin_memory().to(device, non_blocking=True)
                targets = targets.pin_memory().to(device, non_blocking=True)
            yield tokens, targets


def computes_in_bf16(request: Request, device: torch.device) -> bool:
    """Whether a contender other than ours computes in bf16: what is asked for, or where the device has units
    for it."""
    from pretrain.runtime.hardware import supports_bf16

    return supports_bf16(device)[0] if request["precision"] == "auto" else request["precision"] == "bf16"


def train_peer(request: Request, model: torch.nn.Module, loss_of: Callable[..., torch.Tensor]) -> None:
    """The plain loop that both projects' users write: fused AdamW, clipping, bf16 by autocast."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = computes_in_bf16(request, device)
    autocast = (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else contextlib.nullcontext
    model = model.to(device).train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    forward = torch.compile(model) if request["compile"] else model
    rows, length = request["micro_batch"], request["model"]["context_length"]
    turns = Turns(device, rows * length)
    for inputs, labels in batches(request, device):
        with autocast():
            loss = loss_of(forward, inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns(lambda value=loss: value.item())  # type: ignore[misc]


def train_llama(request: Request) -> None:
    """transformers' Llama with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = request["model"]
    config = LlamaConfig(
        vocab_size=64 * math.ceil(model["vocab_size"] / 64),
        hidden_size=model["d_model"],
        intermediate_size=model["ffn_width"],
        num_hidden_layers=len(model["heads"]),
        num_attention_heads=model["heads"][0],
        max_position_embeddings=model["context_length"],
        tie_word_embeddings=model["tie_embeddings"],
        use_cache=False,
        attn_implementation="sdpa",
    )
    # shift_labels: the labels are those of every position already.
    train_peer(
        request,
        LlamaForCausalLM(config),
        lambda forward, inputs, labels: forward(input_ids=inputs, labels=labels, shift_labels=labels).loss,
    )


def train_nanogpt(request: Request) -> None:
    """nanoGPT's model, from the checkout."""
    sys.path.insert(0, request["nanogpt"])
    for name in [name for name in sys.modules if name == "model" or name.startswith("model.")]:
        del sys.modules[name]  # this project's package, which has the same name
    from model import GPT, GPTConfig

    model = request["model"]
    config = GPTConfig(
        block_size=model["context_length"],
        vocab_size=64 * math.ceil(model["vocab_size"] / 64),
        n_layer=len(model["heads"]),
        n_head=model["heads"][0],
        n_embd=model["d_model"],
        bias=False,
    )
    network = GPT(config)
    sys.path.remove(request["nanogpt"])
    del sys.modules["model"]
    train_peer(request, network, lambda forward, inputs, labels: forward(inputs, labels)[1])


def multiply(request: Request) -> None:
    """Bare products in the shapes of the model's layers; a turn times each of them, a hundred times on a
    GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if computes_in_bf16(request, device) else torch.float32
    model = request["model"]
    rows = request["micro_batch"] * model["context_length"]
    widths = (model["d_model"], 3 * model["d_model"], model["ffn_width"], model["vocab_size"])
    turns = Turns(device, rows)
    answer(at=time.time(), device=device.type)
    repeats = 100 if device.type == "cuda" else 1
    while True:
        turns.wait()
        best = 0.0
        for width in widths:
            left = torch.randn(rows, model["d_model"], device=device, dtype=dtype)
            right = torch.randn(model["d_model"], width, device=device, dtype=dtype)
            for _ in range(4):
                began = time.perf_counter()
                for _ in range(repeats):
                    left @ right
                wait()
                seconds = (time.perf_counter() - began) / repeats
                best = max(best, 2 * rows * model["d_model"] * width / seconds)
        answer(flops=best)


PROGRAMS = {"ours": train_ours, "transformers": train_llama, "nanogpt": train_nanogpt, "products": multiply}

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    PROGRAMS[request["program"]](request)
