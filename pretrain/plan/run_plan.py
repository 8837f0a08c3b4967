"""RunPlan: a training command planned by arithmetic, without a GPU and without a process group."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.context_plan import check_context_parallel
from model.errors import UserError, divisors
from model.parallel_plan import check_tensor_parallel, check_world
from model.transformer import Fused
from pretrain.checkpoint.state import TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import DS_CONFIGS
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import EngineSettings, check_against_run
from pretrain.optim.schedule import LearningRateSchedule
from pretrain.plan.corpora import PlannedCorpus, find_corpora, model_fields
from pretrain.plan.memory import MemoryPlan, memory_plan
from pretrain.plan.micro_batch import find_micro_batch, usable_memory
from pretrain.plan.speed import Rates, Work, count_work
from pretrain.plan.traffic import Traffic, traffic
from pretrain.run.decisions import Facts, decide

GIB = 1 << 30
MOST_OFFERS = 4


@dataclass(frozen=True)
class Machine:
    """The nodes and GPUs that a run is planned for."""

    nodes: int
    gpus_per_node: int
    gpu: str | None
    """Key of GPUS, or None where only the memory is known."""
    memory: int
    """Bytes of one GPU."""
    peak: float | None = None
    """FLOP/s of one GPU in the run's precision, None if unknown."""

    @property
    def ranks(self) -> int:
        """Number of ranks, one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def usable(self) -> int:
        """Bytes that a rank's peak may reach."""
        return usable_memory(self.memory, "cuda")


@dataclass(frozen=True)
class RunPlan:
    """Everything that the command prints about a run. Bytes are of one rank."""

    run: RunConfig
    ds_config: dict[str, Any]
    """As it was read; settings holds what its "auto" became."""
    model: ModelConfig
    settings: EngineSettings
    machine: Machine
    batch: BatchPlan
    memory: MemoryPlan
    traffic: Traffic
    work: Work
    """What a rank computes in a step."""
    mfu: float | None
    """Share of the GPUs' peak that such a run was measured to reach."""
    rates: Rates | None = None
    """What one GPU does, from which the time is predicted where there is no *mfu*."""
    corpora: list[PlannedCorpus] | None = None
    """What the run reads; None where it is not on this machine."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.batch.sequences * self.model.context_length

    @property
    def flops_per_step(self) -> int:
        """FLOPs per step over all ranks, by ModelConfig.flops_per_token; recomputation is not counted."""
        return self.tokens_per_step * self.model.flops_per_token()

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per step at *mfu* of the GPUs' peak, or by their rates; None where neither is known."""
        if self.mfu is not None and self.machine.peak is not None:
            return self.flops_per_step / (self.mfu * self.machine.peak * self.machine.ranks)
        if self.rates is not None and self.mfu is None:
            return self.work.seconds(self.rates, self.model.d_model)
        return None

    @property
    def predicted_mfu(self) -> float | None:
        """Share of the GPUs' peak that seconds_per_step is."""
        if self.seconds_per_step is None or self.machine.peak is None:
            return None
        return self.flops_per_step / (self.seconds_per_step * self.machine.peak * self.machine.ranks)

    @property
    def fits(self) -> bool:
        """Whether a rank's peak leaves the margin that pretrain.plan.micro_batch requires."""
        return self.memory.peak <= self.machine.usable


def make_plan(run: RunConfig, ds_config: dict[str, Any], machine: Machine, mfu: float | None) -> RunPlan:
    """Plan a run as pretrain.trainer would start it. Where its precision is left open, every GPU of the table
    has bf16.

    Raises:
        UserError: for what the trainer would reject: sizes that do not divide, contradicting settings.
    """
    check_world(machine.ranks, run.tensor_parallel, run.context_parallel)
    LearningRateSchedule(run.schedule, run.steps)  # lengths that do not fit into the run
    corpora = find_corpora(run)
    asked = run.build_model_config(**model_fields(run, corpora))
    model = run.largest_model_config(asked)
    facts = Facts("cuda", machine.memory, machine.ranks, bf16=(True, "the GPU computes in bf16"))
    decisions = decide(run, ds_config, model, TrainingState(), facts)
    batch, settings = decisions.batch.value, decisions.settings
    sizes = (batch.data_parallel, batch.micro_batch, batch.accumulation, run.tensor_parallel)
    return RunPlan(
        run=run,
        ds_config=ds_config,
        model=model,
        settings=settings,
        machine=machine,
        batch=batch,
        memory=memory_plan(model, settings, *sizes),
        traffic=traffic(model, settings, *sizes),
        work=count_work(model, settings, batch, run.tensor_parallel, compiled=decisions.compile.value),
        mfu=mfu,
        corpora=corpora,
    )


def suggest_flags(plan: RunPlan) -> list[str]:
    """List the flags that would make the plan fit, the cheapest change first.

    After a smaller micro-batch, only changes that allow a larger one than that are listed.
    """
    run, settings, t = plan.run, plan.settings, plan.run.tensor_parallel
    planned = plan.batch.micro_batch
    smaller = _find_largest(plan, settings, t, limit=planned - 1)
    candidates: list[tuple[str, EngineSettings, int]] = []
    if not settings.checkpointing:
        changed = dataclasses.replace(settings, checkpointing=True)
        candidates.append(("--activation_checkpointing true", changed, t))
    for name in ("zero2", "zero3", "zero2_offload", "zero3_offload"):
        path = DS_CONFIGS / f"{name}.json"
        contents = json.loads(path.read_text(encoding="utf-8"))
        if not _admits(check_against_run, contents, run):
            continue
        shipped = EngineSettings.from_run(
            run, contents, settings.bf16, plan.model, _choose_fused(settings, contents)
        )
        if (shipped.stage, shipped.offload_optimizer) > (settings.stage, settings.offload_optimizer):
            candidates.append((f"--ds_config ds_configs/{name}.json", shipped, t))
    if planned == 1:  # else a smaller micro-batch sends nothing more
        for degree in divisors(plan.machine.ranks // t):
            if degree > run.context_parallel and _admits(
                check_context_parallel, plan.model, degree, t, sequence_parallel=run.sequence_parallel
            ):
                changed = dataclasses.replace(settings, context_parallel=degree)
                candidates.append((f"--context_parallel {degree}", changed, t))
    for degree in range(t + 1, plan.machine.ranks + 1):
        if plan.machine.ranks % (degree * run.context_parallel) == 0 and _admits(
            check_tensor_parallel, plan.model, degree, sequence_parallel=run.sequence_parallel
        ):
            wider = dataclasses.replace(run, tensor_parallel=degree)  # "auto" buckets follow the degree
            changed = EngineSettings.from_run(
                wider, plan.ds_config, settings.bf16, plan.model, settings.fused
            )
            candidates.append((f"--tensor_parallel {degree}", changed, degree))
    flags = [f"--micro_batch {smaller}"] if smaller else []
    for flag, changed, degree in candidates:
        micro_batch = _find_largest(plan, changed, degree, limit=planned)
        if micro_batch > smaller:
            flags.append(flag if micro_batch == planned else f"{flag} --micro_batch {micro_batch}")
    return flags[:MOST_OFFERS]


def _choose_fused(settings: EngineSettings, ds_config: dict[str, Any]) -> Fused:
    """What stays fused with another ds_config: at stage 3 the loss at most."""
    whole = settings.fused == "all" and ds_config["zero_optimization"]["stage"] == 3
    return "loss" if whole else settings.fused


def _find_largest(plan: RunPlan, settings: EngineSettings, tensor_parallel: int, limit: int) -> int:
    """The largest valid micro-batch of at most *limit* whose peak fits; 0 if there is none."""
    data_parallel = plan.machine.ranks // (tensor_parallel * settings.context_parallel)
    per_rank, rest = divmod(plan.batch.sequences, data_parallel)
    if rest:
        return 0
    sizes = (data_parallel, tensor_parallel, plan.machine.usable, limit)
    return find_micro_batch(per_rank, plan.model, settings, *sizes) or 0


def _admits(check: Callable[..., None], *given: Any, **more: Any) -> bool:
    """Whether a check raises no UserError."""
    try:
        check(*given, **more)
    except UserError:
        return False
    return True


def check_fits(plan: RunPlan) -> None:
    """Reject a plan whose peak is too large, with a one-line error that lists what would fit.

    Raises:
        UserError: it does not fit.
    """
    if plan.fits:
        return
    offers = suggest_flags(plan)
    settings = f"ZeRO stage {plan.settings.stage}, t = {plan.run.tensor_parallel}"
    advice = "; or ".join(offers) if offers else "more GPUs, or ones with more memory"
    raise UserError(
        f"micro_batch: {plan.batch.micro_batch} sequences of {plan.model.context_length} tokens at "
        f"{settings} need {plan.memory.peak / GIB:.1f} GiB a GPU, and {plan.machine.usable / GIB:.1f} of its "
        f"{plan.machine.memory / GIB:.1f} GiB are usable; what would fit: {advice}"
    )
