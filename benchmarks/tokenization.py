"""Tokenizing a corpus: ``python -m pretrain.prepare`` next to a plain loop and to ``datasets.map``, in one run.

    python benchmarks/tokenization.py --tokenizer gpt2                    # throughput
    python benchmarks/tokenization.py --tokenizer gpt2 --memory           # peak memory over a corpus ten times larger

All three read the same JSON Lines file (the built-in corpus, repeated) with the same tokenizer and write its tokens to
disk. Rounds are interleaved, since other work on a machine comes and goes; the table gives the best round of each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pretrain.data.corpus import BuiltinCorpus  # noqa: E402
from pretrain.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402


def write_corpus(path: Path, megabytes: float) -> int:
    """JSON Lines of about so much text: the built-in corpus, each copy marked so that no two documents are equal.

    Returns:
        Bytes of UTF-8 text.
    """
    size, copy = 0, 0
    with path.open("w", encoding="utf-8") as stream:
        while size < megabytes * 1e6:
            for document in BuiltinCorpus().documents():
                text = f"{copy} {document.text}"
                size += len(text.encode())
                stream.write(json.dumps({"text": text}) + "\n")
                if size >= megabytes * 1e6:
                    break
            copy += 1
    return size


def plain_loop(corpus: Path, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """One document after the other, in this process."""
    tokens = 0
    with corpus.open(encoding="utf-8") as lines, (folder / "tokens.bin").open("wb") as out:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"])
            ids.append(tokenizer.end_of_document)
            out.write(np.array(ids, np.uint16).tobytes())
            tokens += len(ids)
    return tokens


def datasets_map(corpus: Path, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """``datasets.map`` in batches; reading the file into Arrow first is part of it."""
    import datasets

    datasets.disable_progress_bars()
    dataset = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder))
    end = tokenizer.end_of_document

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [[*ids, end] for ids in tokenizer.encode_batch(batch["text"])]}

    started = time.perf_counter()
    mapped = dataset.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
    MAP_ALONE.append(time.perf_counter() - started)
    return sum(len(row) for batch in mapped.with_format("arrow").iter(1000) for row in batch["tokens"])


MAP_ALONE: list[float] = []


def prepare(corpus: Path, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """The command, from its start to the finished folder."""
    tokenizer.save(folder / "tokenizer")
    subprocess.run(
        prepare_command(corpus, folder, processes), cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    meta = json.loads((folder / "corpus" / "meta.json").read_text())
    return meta["training"]["tokens"] + meta["validation"]["tokens"]


def prepare_command(corpus: Path, folder: Path, processes: int) -> list[str]:
    """The command line that tokenizes *corpus* into ``folder/corpus``, with the tokenizer in ``folder/tokenizer``."""
    return [
        sys.executable, "-m", "pretrain.prepare", "--text", str(corpus), "--tokenizer", str(folder / "tokenizer"),
        "--out", str(folder / "corpus"), "--processes", str(processes),
    ]  # fmt: skip


def throughput(tokenizer: Tokenizer, megabytes: float, rounds: int, processes: int) -> None:
    """Print the table of throughputs."""
    contestants: dict[str, Callable[[Path, Tokenizer, Path, int], int]] = {
        "plain loop, 1 process": plain_loop,
        f"datasets.map(num_proc={processes}), with loading": datasets_map,
        f"pretrain.prepare --processes {processes}": prepare,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    busy: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as root:
        corpus = Path(root, "corpus.jsonl")
        size = write_corpus(corpus, megabytes)
        for _ in range(rounds):
            for name, run in contestants.items():
                folder = Path(root, "round")
                folder.mkdir()
                started, cpu_started = time.perf_counter(), cpu_seconds()
                tokens[name] = run(corpus, tokenizer, folder, processes)
                seconds[name].append(time.perf_counter() - started)
                busy[name].append(cpu_seconds() - cpu_started)
                shutil.rmtree(folder)
    assert len(set(tokens.values())) == 1, f"not the same tokens: {tokens}"
    seconds[f"datasets.map(num_proc={processes}), the call alone"] = MAP_ALONE
    count = next(iter(tokens.values()))
    print(f"{size / 1e6:.1f} MB of text, {count:,} tokens, {tokenizer.name}, best of {rounds} rounds\n")
    print(
        "| | seconds (all rounds) | MB/s | processor seconds | MB per processor second |\n|---|---|---|---|---|"
    )
    for name, values in seconds.items():
        listed = ", ".join(f"{value:.1f}" for value in values)
        cpu = min(busy[name]) if name in busy else None
        figures = f"{cpu:.1f} | {size / 1e6 / cpu:.2f}" if cpu else "|"
        print(f"| {name} | {listed} | {size / 1e6 / min(values):.2f} | {figures} |")


def cpu_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def memory(tokenizer: Tokenizer, megabytes: float, processes: int) -> None:
    """Print peak memory of the command and its workers for a corpus and for one ten times larger."""
    print("| text | peak memory, all processes (PSS) | largest process (RSS) |\n|---|---|---|")
    for factor in (1, 10):
        with tempfile.TemporaryDirectory() as root:
            corpus = Path(root, "corpus.jsonl")
            size = write_corpus(corpus, megabytes * factor)
            tokenizer.save(Path(root, "tokenizer"))
            total, largest = peak_memory(prepare_command(corpus, Path(root), processes))
            print(
                f"| {size / 1e6:.0f} MB | {total / 2**20:.0f} MiB | {largest / 2**20:.0f} MiB |", flush=True
            )


def peak_memory(command: list[str]) -> tuple[int, int]:
    """Run *command*; (peak of the sum of proportional set sizes, peak resident size of any process), in bytes.

    PSS counts a page that n processes share as 1/n of a page in each.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peaks = [0, 0]

    def watch() -> None:
        main = psutil.Process(process.pid)
        while process.poll() is None:
            total = 0
            for one in [main, *main.children(recursive=True)]:
                try:
                    info = one.memory_full_info()
                except psutil.Error:
                    continue  # it has just ended
                total += info.pss
                peaks[1] = max(peaks[1], info.rss)
            peaks[0] = max(peaks[0], total)
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    watcher.join()
    if status:
        raise SystemExit(status)
    return peaks[0], peaks[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="gpt2", help="hub name or folder")
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of throughput")
    arguments = parser.parse_args()
    # Each contestant's processes are its parallelism; threads inside them would make a different comparison.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(arguments.tokenizer)
    if arguments.memory:
        memory(tokenizer, arguments.megabytes, arguments.processes)
    else:
        throughput(tokenizer, arguments.megabytes, arguments.rounds, arguments.processes)


if __name__ == "__main__":
    main()
