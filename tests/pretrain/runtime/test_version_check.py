"""Nodes with other code or packages are found before anything begins."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from model.errors import UserError
from pretrain.engine.patches import prepare_deepspeed
from pretrain.runtime import version_check as agreement
from pretrain.runtime.version_check import check_agreement, fingerprint
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed


def refusal(odd_rank, what, value):
    """What each rank says when one of them differs."""
    prepare_deepspeed()
    world = start_world(None, False)
    original = agreement.fingerprint, agreement.socket.gethostname
    rank = dist.get_rank()
    agreement.socket.gethostname = lambda: f"node{rank}"
    if rank == odd_rank and what != "configuration":
        agreement.fingerprint = lambda: fingerprint() | {what: value}
    try:
        check_agreement(world, "steps: 1" if what != "configuration" or rank != odd_rank else "steps: 2")
    except UserError as error:
        return str(error)
    finally:
        agreement.fingerprint, agreement.socket.gethostname = original
    return None


def test_equal_ranks_agree():
    assert run_distributed(refusal, 2, -1, "torch", "0") == [None, None]


@pytest.mark.parametrize(
    ("what", "value"),
    [("torch", "1.0"), ("the code of model/ and pretrain/", "feedbeef"), ("configuration", "")],
)
def test_a_node_that_differs_is_named_on_every_rank(what, value):
    said = run_distributed(refusal, 3, 2, what, value)
    assert len(set(said)) == 1 and said[0] is not None
    assert (
        said[0].startswith("nodes: ")
        and what in said[0]
        and "on node0, " in said[0]
        and "on node2" in said[0]
    )
    assert "node1" not in said[0] and "\n" not in said[0]


def test_code_that_only_looks_at_runs_is_no_other_code(tmp_path, monkeypatch):
    (tmp_path / "pretrain" / "study").mkdir(parents=True)
    (tmp_path / "pretrain" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    before = agreement.code_hash()
    (tmp_path / "pretrain" / "study" / "tables.py").write_text("x = 2\n")
    assert agreement.code_hash() == before
    (tmp_path / "pretrain" / "b.py").write_text("")
    assert agreement.code_hash() != before
    # A run makes its built-in corpus, and plans its micro-batch.
    for name in ("prepare", "plan"):
        before = agreement.code_hash()
        (tmp_path / "pretrain" / name).mkdir()
        (tmp_path / "pretrain" / name / "part.py").write_text("x = 1\n")
        assert agreement.code_hash() != before
