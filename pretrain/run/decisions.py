"""Derives a session's decisions from settings, saved state and machine, in one pure function.

RunConfig holds "auto" where the user leaves a choice, and is never rewritten. ``decide`` makes each choice,
with its reason in words; the result is saved with every checkpoint and next to the run's config.yaml. A
resumed run keeps its earlier choices wherever others would change its numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

import torch

from model.config import ModelConfig
from model.context_plan import check_context_parallel
from model.errors import UserError
from model.parallel_plan import check_tensor_parallel
from model.transformer import Fused
from pretrain.checkpoint.state import Decided, TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import BatchPlan
from pretrain.engine.compiling import find_missing_compiler
from pretrain.engine.ds_config import EngineSettings, bf16_by, check_against_run, merge_ds_config
from pretrain.plan.micro_batch import device_memory, plan_batch
from pretrain.runtime.hardware import supports_bf16
from pretrain.runtime.world import World

T = TypeVar("T")
Attention = Literal["blocks", "torch"]

# Work of a rank, in FLOPs, from which a run on a CPU is compiled: about two minutes of two cores. Compiling
# takes 10 to 30 s; it saves a third of a small model's step and a tenth of a larger one's
# (docs/performance.md).
CPU_FLOPS = 5e12
BLOCKS_CONTEXT = 512
"""Longer sequences gain on an idle machine, too, but lose on a busy one, whose waiting threads sleep."""
AS_BEGUN = "as the run began"
AS_SET = "as set"


@dataclass(frozen=True)
class Facts:
    """The machine and the ranks, as far as decisions depend on them. Equal on all ranks."""

    device: str
    """Kind of device: cpu or cuda."""
    memory: int
    """Bytes of the smallest rank's device."""
    ranks: int = 1
    bf16: tuple[bool, str] = (False, "the device does not compute in bf16")
    """Whether every device computes in bf16, and why or why not."""
    missing_compiler: str | None = None
    """What some node lacks for torch.compile, in a phrase."""
    threads: int = 1
    """CPU threads that each rank has."""
    threads_by: str = ""
    """What the user set their number with, in a phrase; empty where nothing did."""


@dataclass(frozen=True)
class Decision(Generic[T]):
    """One decision."""

    value: T
    reason: str
    """Why, in a phrase."""
    kept: T | None = None
    """What checkpoints keep in place of a value that this session alone needs."""

    @property
    def value_to_save(self) -> T:
        """What a checkpoint keeps."""
        return self.value if self.kept is None else self.kept


@dataclass(frozen=True)
class Decisions:
    """Everything that follows from a request, in the order in which it is decided."""

    model: Decision[ModelConfig]
    largest: ModelConfig
    """The largest model that this one may become; memory and buckets are planned for it."""
    dtype: Decision[Literal["bf16", "fp32"]]
    threads: Decision[int]
    compile: Decision[bool]
    fused: Decision[Fused]
    attention: Decision[Attention]
    batch: Decision[BatchPlan]
    ds_config: Decision[dict[str, Any]]
    """Complete: every "auto" is filled in."""
    settings: EngineSettings
    """What memory and communication depend on."""

    @property
    def bf16(self) -> bool:
        """Whether the model computes in bf16; else in fp32."""
        return self.dtype.value == "bf16"

    def kernels(self) -> dict[str, Any]:
        """What build_network takes of them."""
        return {"compiled": self.compile.value, "fused": self.fused.value, "attention": self.attention.value}

    def to_record(self) -> Decided:
        """What a checkpoint keeps, so that a resumed run makes the same choices."""
        return Decided(
            self.compile.value_to_save,
            self.fused.value_to_save,
            self.attention.value_to_save,
            self.batch.value.micro_batch,
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Every decision's value and reason, as decisions.json holds them."""
        plain: dict[str, dict[str, Any]] = {}
        for item in fields(self):
            decision = getattr(self, item.name)
            if isinstance(decision, Decision):
                value = decision.value
                if isinstance(value, ModelConfig):
                    value = value.to_json()
                elif isinstance(value, BatchPlan):
                    value = vars(value)
                plain[item.name] = {"value": value, "reason": decision.reason}
        return plain


def gather_facts(run: RunConfig, world: World) -> Facts:
    """The facts of all ranks together. Collective."""
    environment = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else ""
    everywhere = world.gather(
        (
            device_memory(world.device, world.local_size),
            supports_bf16(world.device),
            find_missing_compiler(world.device),
        )
    )
    return Facts(
        device=world.device.type,
        memory=min(memory for memory, _, _ in everywhere),
        ranks=world.size,
        bf16=min((bf16 for _, bf16, _ in everywhere), key=lambda bf16: bf16[0]),
        missing_compiler=next((missing for _, _, missing in everywhere if missing), None),
        threads=torch.get_num_threads(),
        threads_by=AS_SET if run.threads is not None else environment,
    )


def decide(
    run: RunConfig,
    ds_config: dict[str, Any],
    model: ModelConfig,
    saved: TrainingState,
    facts: Facts,
) -> Decisions:
    """Make every decision of a session. A function of its arguments alone.

    Args:
        run: the requested settings.
        ds_config: what read_ds_config returned, its "auto" values still in place.
        model: what is trained: of the settings, or the one that a checkpoint continues with.
        saved: the checkpoint's state; one without decisions for a new run.
        facts: of the machine and the ranks.

    Raises:
        UserError: something does not divide, does not fit, or contradicts something else.
    """
    t, stage = run.tensor_parallel, ds_config["zero_optimization"]["stage"]
    known: dict[str, Any] = {"sequence_parallel": run.sequence_parallel, "world_size": facts.ranks}
    check_tensor_parallel(model, t, **known)
    check_context_parallel(model, run.context_parallel, t, **known)
    check_against_run(ds_config, run)
    largest = run.largest_model_config(model)
    dtype = _dtype(run, ds_config, facts)
    bf16 = dtype.value == "bf16"
    compiled = _compile(run, model, stage, saved, facts)
    fused = _fused(run, stage, compiled.value, saved, facts)
    settings = EngineSettings.from_run(run, ds_config, bf16, largest, fused.value)
    batch = _batch(run, largest, saved, facts, settings)
    return Decisions(
        model=Decision(model, "of the checkpoint" if saved.model else AS_SET),
        largest=largest,
        dtype=dtype,
        threads=_threads(saved, facts),
        compile=compiled,
        fused=fused,
        attention=_attention(run, bf16, model.context_length, saved, facts),
        batch=batch,
        ds_config=Decision(
            merge_ds_config(ds_config, run, batch.value, bf16, largest),
            "the ds_config, completed by the run's settings and the decisions above",
        ),
        settings=settings,
    )


def _dtype(run: RunConfig, ds_config: dict[str, Any], facts: Facts) -> Decision[Literal["bf16", "fp32"]]:
    """bf16 where it is asked for, or left open and the device has it."""
    asked = bf16_by(run, ds_config)
    bf16, reason = asked if asked is not None else facts.bf16
    return Decision("bf16" if bf16 else "fp32", reason)


def _threads(saved: TrainingState, facts: Facts) -> Decision[int]:
    """CPU threads per rank: those that a run on CPUs began with, since the bits depend on them.

    With another number of ranks the numbers differ anyway, and the cores are divided again.
    """
    before = saved.world
    if facts.threads_by:
        return Decision(facts.threads, facts.threads_by)
    if before is None or before.ranks != facts.ranks or facts.device != "cpu":
        return Decision(facts.threads, "the cores shared among the ranks")
    return Decision(before.threads, AS_BEGUN)


def _compile(
    run: RunConfig, model: ModelConfig, stage: int, saved: TrainingState, facts: Facts
) -> Decision[bool]:
    """Whether the blocks, the final norm and the loss are compiled. Nothing is timed: a resumed run decides
    alike.

    Raises:
        UserError: it is asked for and cannot be.
    """
    if run.compile is True and facts.missing_compiler:
        raise UserError(
            f"compile: true cannot be: {facts.missing_compiler}; install it, or leave compile out"
        )
    if isinstance(run.compile, bool):
        return Decision(run.compile, AS_SET)
    if stage == 3:
        kept = saved.decided.compile if saved.decided is not None else None
        return Decision(False, "not at ZeRO stage 3, whose hooks split every block", kept)
    same_device = saved.world is None or saved.world.device == facts.device
    if saved.decided is not None and same_device and not (saved.decided.compile and facts.missing_compiler):
        return Decision(saved.decided.compile, AS_BEGUN)
    if facts.missing_compiler:
        before = saved.decided.compile if saved.decided is not None and same_device else None
        return Decision(False, facts.missing_compiler, before)
    if facts.device == "cuda":
        return Decision(True, f"ZeRO stage {stage} on a GPU")
    flops = run.steps * run.global_batch_tokens * model.flops_per_token() / facts.ranks
    if flops < CPU_FLOPS:
        return Decision(False, f"{flops:.1e} FLOPs on a CPU are too few to gain by it")
    return Decision(True, f"{flops:.1e} FLOPs on a CPU")


def _fused(run: RunConfig, stage: int, compiled: bool, saved: TrainingState, facts: Facts) -> Decision[Fused]:
    """Which products are fused, as in Transformer's *fused*.

    auto fuses the LM head with the loss; where a GPU's blocks are compiled also q, k, v and gate, up. Without
    a compiler the gradients of these products would have to be copied together, which costs as much as fusing
    saves; on a CPU it made no difference (docs/performance.md).
    """
    if run.fused != "auto":
        return Decision(run.fused, AS_SET)
    if saved.decided is not None:
        before = saved.decided.fused
        if before == "all" and stage == 3:
            return Decision("loss", "ZeRO stage 3 gathers layer by layer", before)
        return Decision(before, AS_BEGUN)
    if facts.device == "cuda" and stage < 3 and compiled:
        return Decision("all", "compiled on a GPU")
    return Decision("loss", "saves the memory of the logits")


def _attention(
    run: RunConfig, bf16: bool, context_length: int, saved: TrainingState, facts: Facts
) -> Decision[Attention]:
    """Whether attention is computed by torch's kernels, or as model/block_attention.py does it.

    auto: blocks on a CPU in bf16 up to BLOCKS_CONTEXT tokens, where they are faster at every head dim from 16
    to 384 (docs/performance.md). In fp32 they gain little; GPUs have kernels that they would not reach.
    """
    if run.attention != "auto":
        return Decision(run.attention, AS_SET)
    if saved.decided is not None:
        before = saved.decided.attention
        if before == "blocks" and (facts.device != "cpu" or run.document_mask):
            return Decision("torch", AS_BEGUN, before)
        return Decision(before, AS_BEGUN)
    if run.document_mask:
        return Decision("torch", "blocks know no document masks")
    if facts.device == "cpu" and bf16 and context_length <= BLOCKS_CONTEXT:
        return Decision("blocks", f"faster on a CPU in bf16 up to {BLOCKS_CONTEXT} tokens")
    return Decision("torch", "torch's kernels are the fastest here")


def _batch(
    run: RunConfig, model: ModelConfig, saved: TrainingState, facts: Facts, settings: EngineSettings
) -> Decision[BatchPlan]:
    """The batch's division among ranks, micro-batches and accumulation steps.

    A micro-batch that an earlier session chose is kept, so that results stay bit-identical; unless it was
    chosen for another tensor- or context-parallel degree, or does not divide a rank's sequences per step.
    """
    data_parallel = facts.ranks // (run.tensor_parallel * run.context_parallel)
    per_rank = run.global_batch_tokens // model.context_length // data_parallel
    before = saved.decided.micro_batch if saved.decided else 0
    degrees = (saved.world.tensor_parallel, saved.world.context_parallel) if saved.world else (1, 1)
    micro_batch, reason = run.micro_batch, f"micro_batch: {run.micro_batch}"
    if micro_batch is None:
        reason = f"the largest micro-batch that fits into {facts.memory / 2**30:.1f} GiB"
        if before and degrees == (run.tensor_parallel, run.context_parallel) and per_rank % before == 0:
            micro_batch, reason = before, AS_BEGUN
    plan = plan_batch(
        run.global_batch_tokens,
        micro_batch,
        model,
        data_parallel,
        facts.memory,
        facts.device,
        run.tensor_parallel,
        settings,
    )
    return Decision(plan, reason)
