"""How often a step waits for the device: counted on a CPU by the operations that read a tensor's value."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.trainer import Trainer
from tests.helpers.distributed import ROOT, run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import nano_run, session

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"}
READS |= {"unique", "_unique2"}
"""Operations whose result the host needs before it can go on. float(tensor), bool(tensor) and .item() are the
first."""
UNDISPATCHED = ("tolist", "numpy")
"""Methods that read a CPU tensor without an operation, and would wait for a GPU's."""
MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operations that read their index if it is a mask."""
OURS = tuple(f"{ROOT}/{package}/" for package in ("model", "pretrain"))


def place() -> tuple[str, str]:
    """Whose code is innermost in the stack, "ours" or "deepspeed", and its file and function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if "/deepspeed/" in path:
            return "deepspeed", f"{Path(path).name}:{function}"
        if path.startswith(OURS):
            return "ours", f"{Path(path).name}:{function}"
        frame = frame.f_back
    return "other", "?"


class Counting(TorchDispatchMode):
    """Counts reads by place, for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Counter[tuple[str, str]]] = [Counter()]

    def note(self) -> None:
        self.steps[-1][place()] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        mask = name in MASKED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if mask or name in READS:
            self.note()
        return func(*args, **kwargs or {})


@contextmanager
def counting_reads() -> Iterator[Counting]:
    """Count inside the block, methods that no operation shows included."""
    counting = Counting()

    def noting(original: Callable[..., object]) -> Callable[..., object]:
        def noted(tensor: torch.Tensor, *arguments: object) -> object:
            counting.note()
            return original(tensor, *arguments)

        return noted

    with ExitStack() as stack:
        for name in UNDISPATCHED:
            stack.enter_context(mock.patch.object(torch.Tensor, name, noting(getattr(torch.Tensor, name))))
        yield stack.enter_context(counting)


def counted(run, stage):
    """Train *run*, and return the reads of every step."""
    before_step = Trainer._before_step
    with counting_reads() as counting:

        def next_step(trainer):
            counting.steps.append(Counter())
            return before_step(trainer)

        with mock.patch.object(Trainer, "_before_step", next_step):
            assert session(run, stage)[1] is None
    return [dict(step) for step in counting.steps[1:]]


def reads_of(line):
    """The places that count for one line that reads a tensor."""
    with counting_reads() as counting:
        line(torch.tensor([1.5]))
    return sum(counting.steps[0].values())


def test_every_way_to_read_a_tensor_is_counted():
    for way in ("item", "tolist", "numpy", "nonzero", "__float__", "__bool__"):
        assert reads_of(lambda t, way=way: getattr(t, way)()) >= 1, way
    assert reads_of(lambda t: t[t > 0]) >= 1 and reads_of(lambda t: torch.equal(t, t)) >= 1
    assert reads_of(lambda t: (t * 2 + t.sum()).clamp(0)) == 0


NORM, CLIP = "utils.py:is_invalid_grad_norm", "utils.py:clip_tensors_by_global_norm"
OVERFLOW = "stage_1_and_2.py:has_overflow"
DEEPSPEEDS = [*slow([(1, "fp32", {NORM: 3}), (2, "fp32", {NORM: 3}), (3, "fp32", {NORM: 1})])]
DEEPSPEEDS += [(3, "bf16", {NORM: 1})]
DEEPSPEEDS += slow([(1, "bf16", {NORM: 1, CLIP: 1}), (2, "bf16", {NORM: 3, OVERFLOW: 1})])


@pytest.mark.parametrize(("stage", "precision", "deepspeeds"), DEEPSPEEDS)
def test_a_step_without_logging_waits_once_at_most_for_our_code(
    stage, precision, deepspeeds, small_folder, tmp_path
):
    """Our one read is of the vote on stopping, which is in the host's memory; docs/performance.md lists the
    others."""
    quiet = "--logging.every 100 --validation.every 0 --checkpoint.every 100"
    run = nano_run(small_folder, tmp_path, f"--steps 5 --precision {precision} {quiet}")
    for steps in run_distributed(counted, 2, run, stage, timeout=120):
        found = {whose: {} for whose in ("ours", "deepspeed", "other")}
        for (whose, where), number in steps[3].items():
            found[whose][where] = number
        assert sum(found["ours"].values()) <= 1, found["ours"]
        assert found["deepspeed"] == deepspeeds and not found["other"]
