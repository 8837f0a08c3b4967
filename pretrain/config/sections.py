"""The sections of a RunConfig: what a recipe writes as ``optimizer: {learning_rate: 3e-4}``, a class each.

Types and ranges are in the declarations, and hold however an object is made. Nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from model.declared import (
    LARGEST_INTEGER,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    declared,
)
from model.errors import UserError, quote

Beta = Annotated[float, Field(ge=0, lt=1)]


@declared("optimizer")
class OptimizerConfig:
    """AdamW, decoupled weight decay (Loshchilov & Hutter 2019), alone or combined with Muon."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw uses AdamW for all parameters; muon uses Muon for the matrices of the blocks, and AdamW for
    embeddings, LM head, norms, biases and the gates of heads."""
    reset: bool = False
    """Allow a resumed run to change its optimizer: the weights are kept, the optimizer state is reset. It has
    no effect while the kind is the same."""
    learning_rate: PositiveFloat = 6.0e-4
    """Peak learning rate, reached at the end of the warmup."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1.0e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of matrices (and embeddings, see decay_embeddings); never of norms and biases. Scaled by the
    rate."""
    decay_embeddings: bool = False
    """Whether token and position embeddings are decayed too (the Prism paper does not say)."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 turns clipping off."""


MuonScale = Literal["rms", "spectral", "unit"]


def _to_head_group(value: Any) -> Any:
    """A number of heads as the field keeps it; a group of one is each."""
    if value in ("whole", "each"):
        return value
    if type(value) is int and 1 <= value <= LARGEST_INTEGER:
        return value if value > 1 else "each"
    raise UserError(f"muon.heads: {quote(value)} is not valid; give whole, each, or a number of heads from 1")


HeadGroup = Annotated[
    Literal["whole", "each"] | int,
    PlainValidator(_to_head_group, json_schema_input_type=Literal["whole", "each"] | PositiveInt),
]


@declared("muon")
class MuonConfig:
    """Muon (Jordan 2024): momentum, made orthogonal by Newton-Schulz iterations; for optimizer.kind muon."""

    heads: HeadGroup = "whole"
    """Unit of orthogonalization: whole orthogonalizes whole matrices; each does so for every head of q, k, v
    and element gates (rows) and o (columns); a number for groups of that many neighbouring heads (arXiv
    2605.08933). The last group is smaller where the number does not divide the layer's heads."""
    scale: MuonScale = "rms"
    """Factor of the orthogonal update of rows x cols. rms is 0.2 sqrt(max(rows, cols)), with which rates of
    AdamW carry over (arXiv 2502.16982); spectral is sqrt(rows / cols) (arXiv 2310.17813); unit is 1."""
    momentum: Beta = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Nesterov momentum: whether the newest gradient is added once more."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate of these matrices; optimizer.learning_rate when not given."""


@declared("schedule")
class ScheduleConfig:
    """Learning rate over the run. Numbers below 1 are fractions of the run, others are steps."""

    kind: Literal["cosine", "linear", "wsd"] = "cosine"
    """Decay after the warmup. cosine follows half a cosine from the peak to the minimum, linear a straight
    line. wsd stays at the peak (warmup, stable, decay) and ends with a linear decay."""
    warmup: NonNegativeFloat = 0.025
    """Linear warmup, as a fraction of the run (below 1) or in steps."""
    decay: NonNegativeFloat = 0.2
    """Length of the final decay of wsd, as a fraction of the run (below 1) or in steps; the others ignore
    it."""
    minimum: UnitInterval = 0.1
    """Final learning rate as a fraction of the peak (the Prism paper does not state it; 0.1 is nanoGPT's)."""


@declared("validation")
class ValidationConfig:
    """Loss on a fixed set of held-out windows."""

    every: NonNegativeInt = 250
    """Steps between validations; the last step is always validated. 0 turns validation off."""
    sequences: PositiveInt = 256
    """Number of windows, spread evenly over the validation split; fewer if the split is shorter."""
    data: str | None = None
    """Another corpus (or blend) of the same tokenizer, whose validation split is validated on in place of
    data's; all of it where it has no split, as a .bin/.idx pair has none."""


@declared("checkpoint")
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: NonNegativeInt = 500
    """Steps between checkpoints; the last step is always saved. 0 saves the last step only."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Checkpoints at multiples of this step are kept for good; 0 keeps none beyond keep_last."""
    background: bool = True
    """Write in the background: training stops only while tensors are copied to the host's memory, which must
    have room for a rank's share of the checkpoint."""
    mirror: str | None = None
    """Copy checkpoints to a store in the background: s3://bucket/folder, gs://bucket/folder or
    file:///folder. A local checkpoint is deleted only after its copy was verified. A run whose folder is lost
    resumes from the store."""
    mirror_reserve: NonNegativeFloat = 10.0
    """GiB. With less left on the disk, the oldest checkpoint that is not copied yet is deleted all the same;
    the newest two stay."""


@declared("interruption")
class InterruptionConfig:
    """What ends a session before its last step. In each case, the same command resumes the run."""

    minutes: PositiveFloat | None = None
    """Wall-clock budget of a session: when it is used up, the run saves and ends with exit code 75. None sets
    no limit."""
    agreement_seconds: PositiveFloat = 300.0
    """How long a rank that was asked to stop waits for the others to agree; then it ends without saving."""
    hang_minutes: NonNegativeFloat = 30.0
    """Without progress for so long (a step, a batch of a validation, a checkpoint), every rank writes its
    stacks into the run folder and ends with exit code 76. 0 turns it off."""


@declared("logging")
class LoggingConfig:
    """What is shown while training. metrics.jsonl has a row for every step, regardless of these settings."""

    every: PositiveInt = 10
    """Steps between reads of the loss from the device (each is a host synchronization)."""
    seconds: NonNegativeFloat = 5.0
    """Shortest time between two printed lines when the output is not a terminal."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of Weights & Biases, which never prompts. auto follows WANDB_MODE, and without it writes nothing.
    online falls back to offline where nobody is logged in."""
    wandb_project: str | None = None
    """Project that runs are filed under; by default that of WANDB_PROJECT, else head-schedules."""
    tensorboard: bool = False
    """Whether event files for TensorBoard are written into the run's folder."""
    sample: NonNegativeInt = 96
    """Tokens of the sample that is printed after the last step; 0 prints none."""


@declared("evaluation")
class EvaluationConfig:
    """Zero-shot scores while training, through lm-eval; the training numbers do not change."""

    every: NonNegativeInt = 0
    """Steps between evaluations; the last step is also evaluated. 0 turns evaluation off, and lm-eval is not
    imported."""
    tasks: str = "papers"
    """lm-eval's task names, such as piqa,arc_easy, or the group papers (the Prism paper's six)."""
    include_path: str | None = None
    """Folder with more tasks as lm-eval's YAMLs; code that they name is run."""
    num_fewshot: NonNegativeInt | None = None
    """Few-shot examples before each item; by default the task's own number, else none."""
    limit: PositiveInt | None = None
    """At most this many items of each task; all when not given."""
    data_dir: str | None = None
    """Folder of the tasks' data sets (head-schedules evaluate save); the Hugging Face hub when not
    given."""


@declared("diagnostics")
class DiagnosticsConfig:
    """What --diagnostics_every measures, and on what. See docs/diagnostics.md."""

    sequences: PositiveInt = 8
    """Held-out windows that are read each time."""
    positions: PositiveInt = 64
    """Positions of each window that are compared to see features drift."""
    release: NonNegativeFloat | None = None
    """Step (or fraction of the run) whose W_Q and W_K are kept, to tell how far they move from there; when
    not given, the end of the first slow-down of W_Q or W_K by a rule, if one ends. For controls, that of the
    run that they are compared with."""


@declared("maturity")
class MaturityConfig:
    """When the lower half of the layers counts as settled, for rules with release: maturity.

    See pretrain/diagnostics/maturity.py. The rule of arXiv 2605.10504 is not public; this one, and every
    number here, is ours.
    """

    every: PositiveFloat = 0.005
    """Steps (or fraction of the run) between two probes."""
    settled: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Settled is a drift between two probes of at most this share of the largest one so far."""
    patience: PositiveInt = 2
    """Consecutive probes that must find the model settled."""
    sequences: PositiveInt = 8
    """Held-out windows that a probe reads."""
    positions: PositiveInt = 64
    """Positions of each that are compared."""


@declared("llr")
class LLRConfig:
    """Learning rates that follow the spectra of the weights (LLR, arXiv 2605.22297).

    See pretrain/diagnostics/spectral_rates.py and docs/learning_rates.md. Numbers of lengths below 1 are
    fractions of the run, others are steps.
    """

    apply: Literal["none", "each", "shuffled", "mean", "embeddings"] = "none"
    """Which factors multiply learning rates. each gives every matrix its own factor, as in the paper. The
    other values are controls. shuffled exchanges the factors among the matrices (embeddings and head keep
    theirs), mean gives all matrices their mean, and embeddings keeps only those of embeddings and head."""
    measure: Literal["exponent", "excess"] = "exponent"
    """exponent measures the tail exponent, as in the paper; excess subtracts that of a random matrix of the
    same shape."""
    low: PositiveFloat = 1.0
    """Factor of the least exponent."""
    high: PositiveFloat = 5.0
    """Factor of the largest exponent, and of embeddings and head."""
    every: PositiveFloat = 100
    """Steps, or a fraction of the run, between two measurements."""
    until: NonNegativeFloat = 0.2
    """Steps, or a fraction of the run, after which nothing is measured; 0 measures only before
    the first step."""
    transition: NonNegativeFloat = 50
    """Steps, or a fraction of the run, over which factors move to new ones."""
    least: PositiveInt = 50
    """Matrices with fewer singular values keep the base rate."""

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise UserError(f"llr.high: {self.high:g} is below llr.low, {self.low:g}; give at least that")

    @property
    def active(self) -> bool:
        """Whether spectra are measured."""
        return self.apply != "none"


def length_in_steps(name: str, value: float, steps: int) -> int:
    """Turn a length given as a fraction of the run (below 1) or in steps into steps.

    Raises:
        UserError: a length in steps that is not a whole number.
    """
    if value < 1:
        return round(value * steps)
    if value != int(value):
        raise UserError(f"{name}: {value} is neither a fraction below 1 nor a whole number of steps")
    return int(value)


def step_of_run(name: str, value: float, steps: int) -> int:
    """The step of a run that is so long after its beginning, as length_in_steps reads it.

    Raises:
        UserError: as length_in_steps, and a step beyond the run.
    """
    step = length_in_steps(name, value, steps)
    if step > steps:
        raise UserError(f"{name}: step {step} is beyond the run of {steps} steps")
    return step


def phase_in_steps(name: str, value: float, steps: int) -> int:
    """length_in_steps for a phase that may last the whole run.

    Raises:
        UserError: exactly 1, which is one step by that rule, but may be meant as a fraction: the whole run.
    """
    if value == 1 and steps > 1:
        raise UserError(
            f"{name}: {value} may mean one step or the whole run; write {1 / steps:.3g} for one step of the "
            f"run's {steps}, {steps} for all of them"
        )
    return length_in_steps(name, value, steps)


def describe_phase(phase: int, steps: int) -> str:
    """So many of a run's *steps*, as phase_in_steps reads them."""
    return f"{1 / steps:.3g}, one step" if phase == 1 else f"{phase} steps"
