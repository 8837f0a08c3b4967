"""RunConfig: everything that defines a run, filled from a YAML recipe and from command-line flags.

The same names serve in both places: ``optimizer: {learning_rate: 3e-4}`` in a recipe is
``--optimizer.learning_rate 3e-4`` on the command line; flags win. Parsing is jsonargparse's; the checks that span
fields, and the messages, are ours. Nothing heavy is imported here, so that a typing error is answered at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from model.config import ModelConfig
from model.errors import UserError
from model.heads import parse_heads
from pretrain.config.growth import GrowthConfig
from pretrain.config.lr_rules import parse_rules
from pretrain.config.model_file import named_model
from pretrain.config.ranges import check_numbers, from_zero, positive, ranged
from pretrain.utils.parsing import read_json_object

DEFAULT_RECIPE = "micro"
MOST_BATCH_TOKENS = 10**12
MAX_NAME_BYTES = 200  # file systems take 255; checkpoints and locks add to it


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, decoupled weight decay (Loshchilov & Hutter 2019)."""

    learning_rate: float = positive(6.0e-4)
    """Peak learning rate, reached at the end of the warmup."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = positive(1.0e-8)
    """Added to the root of the second moment."""
    weight_decay: float = from_zero(0.1)
    """Decay of matrices (and embeddings, see decay_embeddings); never of norms and biases. Scaled by the rate."""
    decay_embeddings: bool = False
    """Whether token and position embeddings are decayed too (the Prism paper does not say)."""
    gradient_clipping: float = from_zero(1.0)
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 turns clipping off."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run. Numbers below 1 are fractions of the run, others are steps."""

    kind: Literal["cosine", "linear", "wsd"] = "cosine"
    """cosine: half a cosine from the peak to the minimum. linear: a straight line there. wsd: warmup, stable, then a
    linear decay."""
    warmup: float = from_zero(0.025)
    """Linear warmup, as a fraction of the run (below 1) or in steps."""
    decay: float = from_zero(0.2)
    """Length of the final decay of wsd, as a fraction of the run (below 1) or in steps; the others ignore it."""
    minimum: float = ranged(0.1, lambda value: 0 <= value <= 1, "a fraction of the peak in [0, 1]")
    """Final learning rate as a fraction of the peak (the Prism paper does not state it; 0.1 is nanoGPT's)."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on a fixed set of held-out windows."""

    every: int = from_zero(250)
    """Steps between validations; the last step is always validated. 0 turns validation off."""
    sequences: int = positive(256)
    """Number of windows, spread evenly over the validation split; fewer if the split is shorter."""
    data: str | None = None
    """Another corpus (or blend) of the same tokenizer, whose validation split is validated on in place of data's; all
    of it where it has no split, as a .bin/.idx pair has none."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Zero-shot scores while training, through lm-eval; the training numbers do not change."""

    every: int = from_zero(0)
    """Steps between evaluations; with any, the last step is evaluated too. 0: none, and lm-eval is not imported."""
    tasks: str = "papers"
    """lm-eval's task names, such as piqa,arc_easy, or the group papers (the Prism paper's six)."""
    limit: int | None = positive(None)
    """At most this many items of each task; all when not given."""
    data_dir: str | None = None
    """Folder of the tasks' data sets (python -m pretrain.evaluation save); the Hugging Face hub when not given."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = from_zero(500)
    """Steps between checkpoints; the last step is always saved. 0 saves the last step only."""
    keep_last: int = positive(2)
    """How many of the newest checkpoints to keep."""
    keep_every: int = from_zero(0)
    """Checkpoints at multiples of this step are kept for good; 0 keeps none beyond keep_last."""
    background: bool = True
    """Write beside the training: it stops only while tensors are copied to the host's memory, which must have room for
    a rank's share of the checkpoint."""


@dataclass(frozen=True)
class InterruptionConfig:
    """What ends a session before its last step. Each way, the same command continues the run."""

    minutes: float | None = positive(None)
    """Wall-clock budget of a session: after so long the run saves and ends with exit code 75. None sets no limit."""
    agreement_seconds: float = positive(300.0)
    """How long a rank that was asked to stop waits for the others to agree; then it ends without saving."""
    hang_minutes: float = from_zero(30.0)
    """Without progress for so long (a step, a batch of a validation, a checkpoint), every rank writes its stacks into
    the run folder and ends with exit code 76. 0 turns it off."""


@dataclass(frozen=True)
class DiagnosticsConfig:
    """What --diagnostics_every measures, and on what. See docs/diagnostics.md."""

    sequences: int = positive(8)
    """Held-out windows that are read each time."""
    positions: int = positive(64)
    """Positions of each window that are compared to see features drift."""
    release: float | None = from_zero(None)
    """Step (or fraction of the run) whose W_Q and W_K are kept, to tell how far they move from there; when not given,
    the end of the first slow-down of W_Q or W_K by a rule, if one ends. For controls, that of the run that they are
    compared with."""


@dataclass(frozen=True)
class MaturityConfig:
    """When the lower half of the layers counts as settled, for rules with release: maturity.

    See pretrain/diagnostics/maturity.py. The rule of arXiv 2605.10504 is not public; this one, and every number here,
    is ours.
    """

    every: float = positive(0.005)
    """Steps (or fraction of the run) between two probes."""
    settled: float = ranged(0.5, lambda value: 0 < value <= 1, "a share in (0, 1]")
    """Settled is a drift between two probes of at most this share of the largest one so far."""
    patience: int = positive(2)
    """Probes in a row that must find it so."""
    sequences: int = positive(8)
    """Held-out windows that a probe reads."""
    positions: int = positive(64)
    """Positions of each that are compared."""


@dataclass(frozen=True)
class LoggingConfig:
    """What is shown while training. metrics.jsonl has a row for every step, whatever these say."""

    every: int = positive(10)
    """Steps between reads of the loss from the device (each is a host synchronisation)."""
    seconds: float = from_zero(5.0)
    """Shortest time between two printed lines when the output is not a terminal."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: as WANDB_DISABLED or WANDB_MODE say; without them online when logged in, else offline. Never asks."""
    wandb_project: str = "head-schedules"
    """Project that runs are filed under."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run.

    Raises:
        UserError: a field is out of range, or two fields contradict.
    """

    model: str = "prism-micro"
    """Preset (python -m pretrain.presets lists them), the path of a JSON file holding a ModelConfig, or a run's folder,
    whose newest checkpoint's model is trained again from the start."""
    heads: str | None = None
    """Head schedule in place of the preset's, such as 3x2,6x2,8x2,12x6; one head count per layer."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that replace the preset's, such as {norm: layernorm, context_length: 512}."""
    task: Literal["language", "classification"] = "language"
    """language: predict the next token. classification: predict the class of a whole sequence, at its end; data is
    then a labelled corpus (python -m pretrain.prepare labelled)."""
    data: str = "builtin"
    """builtin (the running Python's standard library), a prepared corpus folder, the prefix of a .bin/.idx pair of
    Megatron's tools, or a blend a:0.7,b:0.3."""
    document_mask: bool = False
    """Keep the documents of a window apart: no attention from one to another, positions beginning anew in each, in
    training and validation. Fixed for the whole run."""
    tokenizer: str | None = None
    """Tokenizer folder, SentencePiece .model file or hub name, for .bin/.idx pairs: they do not say theirs. Corpus
    folders bring their own, and another is refused."""
    data_root: str = "data"
    """Where the built-in corpus is written, once."""
    vocab_size: int = positive(4096)
    """Entries of the tokenizer that is trained for the built-in text; prepared corpora bring their own."""
    seed: int = from_zero(1)
    """Seeds the weights and the order of the data."""
    steps: int = positive(1000)
    """Optimizer steps in the whole run."""
    global_batch_tokens: int = positive(262144)
    """Tokens per optimizer step over all ranks; a multiple of the context length."""
    micro_batch: int | None = positive(None)
    """Sequences per rank and forward pass; chosen from the device's memory when not given."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_rules: list[dict[str, Any] | str] = field(default_factory=list)
    """Parameters whose learning rate leaves the schedule, first match wins: [{name: slow, parameters: [q, k], layers:
    upper_half, scale: 0.25, hold: 0.04, ramp: 0.01}], or names: [upper_qk]. See docs/learning_rates.md."""
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    """Heads that are added and pruned while the model trains. See docs/growth.md."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    interruption: InterruptionConfig = field(default_factory=InterruptionConfig)
    diagnostics_every: int = from_zero(250)
    """Steps between measurements of attention, residual writes and the movement of weights; 0 turns them off."""
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    maturity: MaturityConfig = field(default_factory=MaturityConfig)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """What "auto" in the ds_config's bf16 means; auto: bf16 where the device computes in it, else fp32."""
    tensor_parallel: int = positive(1)
    """t: ranks that share one copy of the model, neighbours; divides the number of ranks and the model's widths."""
    sequence_parallel: bool = False
    """With tensor_parallel: cut hidden states between its layers along T. Less memory; the same bytes travel."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more computation."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model with torch.compile: slower to start, faster steps, ZeRO stages 1 and 2 only. auto: on GPUs, and
    on CPUs for runs of some minutes. What a run began with is kept when it is resumed."""
    fused: Literal["auto", "all", "loss", "none"] = "auto"
    """What is computed in one. loss: the output head and the loss, where tensor_parallel is 1, which saves the memory
    of the logits. all: also q, k and v, and gate and up, not at ZeRO stage 3. none: each by itself. auto: all where a
    GPU's model is compiled, else loss. Only rounding changes; what a run began with is kept when it is resumed."""
    attention: Literal["auto", "blocks", "torch"] = "auto"
    """How attention is computed. torch: by torch's kernels. blocks: by products over blocks of queries, which is faster
    on a CPU in bf16, and rounds more. auto: blocks there up to 512 tokens, else torch. What a run began with is kept
    when it is resumed."""
    threads: int | None = positive(None)
    """CPU threads per rank; the cores are shared among the ranks when not given. Kept when a run is resumed."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (CUDA; CPU kernels are deterministic already)."""
    max_skipped_steps: int = positive(10)
    """Consecutive updates skipped for a non-finite loss or gradient, or as spikes, after which the run stops."""
    skip_spikes: float = from_zero(0.0)
    """Skip updates whose loss or gradient norm lies so many standard deviations above the last 128 steps (OLMo: 6);
    0 skips none."""
    name: str | None = None
    """Name of the run folder; RECIPE-MODEL-sSEED when not given."""
    runs_dir: str = "runs"
    """Where run folders are made."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest valid checkpoint of the run folder. never: refuse a folder that has one."""
    recipe: str = DEFAULT_RECIPE
    """Name of the recipe this configuration came from; set by --config, part of the run's name."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.global_batch_tokens > MOST_BATCH_TOKENS:
            raise UserError(
                f"global_batch_tokens: {self.global_batch_tokens:,} is not valid; give at most {MOST_BATCH_TOKENS:,}"
            )
        for beta in self.optimizer.betas:
            if not 0 <= beta < 1:
                raise UserError(f"optimizer.betas: {beta} is not valid; give two numbers in [0, 1)")
        parse_rules(self.lr_rules)
        self._check_task()
        self.growth.check(self.heads, self.steps)
        for field_name, folder_name in (("name", self.name), ("recipe", self.recipe)):
            if folder_name is not None and not is_folder_name(folder_name):
                raise UserError(
                    f"{field_name}: {folder_name[:80]!r} is not valid; give one folder name of at most "
                    f"{MAX_NAME_BYTES} bytes, without '/' or control characters and not starting with '.'"
                )

    def _check_task(self) -> None:
        """Refuse settings that a classifier has no use for."""
        if "classes" in self.architecture:
            raise UserError(
                "architecture.classes: it comes from the data; leave it out, and give --task classification"
            )
        if self.task == "language":
            return
        for name, given, reason in (
            ("document_mask", self.document_mask, "every example is a sequence of its own"),
            ("sequence_parallel", self.sequence_parallel, "the head reads one position of each sequence"),
            ("evaluation.every", self.evaluation.every, "its tasks need a language model"),
            ("validation.data", self.validation.data, "a labelled corpus has its own validation examples"),
            ("tokenizer", self.tokenizer, "a labelled corpus brings its own"),
        ):
            if given:
                raise UserError(
                    f"{name}: {given} does not go with --task classification: {reason}; leave it out"
                )

    @property
    def run_name(self) -> str:
        """Name of the run folder: ``name``, or RECIPE-MODEL-sSEED."""
        return self.name or f"{self.recipe}-{Path(self.model).stem}-s{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder, ``runs_dir/run_name``."""
        return Path(self.runs_dir) / self.run_name

    def build_model_config(self, vocab_size: int | None = None, classes: int | None = None) -> ModelConfig:
        """The model of step 0: with growth the heads that it starts with, else fixed_model_config.

        Raises:
            UserError: as fixed_model_config, and if the model cannot grow.
        """
        model = self.fixed_model_config(vocab_size, classes)
        return self.growth.start_model(model, self.tensor_parallel) if self.growth.active else model

    @property
    def most_heads(self) -> int:
        """Most heads of a layer that a run with growth may reach."""
        return self.growth.maximum or max(self.fixed_model_config().heads)

    def largest_model_config(self, model: ModelConfig) -> ModelConfig:
        """The largest that *model* may become; itself without growth. Memory, batch and buckets are planned for it."""
        if not self.growth.active:
            return model
        return model.replace(heads=tuple(max(heads, self.most_heads) for heads in model.heads))

    def fixed_model_config(self, vocab_size: int | None = None, classes: int | None = None) -> ModelConfig:
        """The preset with ``architecture``, ``heads`` and the tokenizer's *vocab_size* in place.

        A classifier has as many *classes* as its data; until they are known, two.

        Raises:
            UserError: unknown preset or field, a schedule of the wrong length, or values that do not fit together.
        """
        base = _named_or_trained(self.model)
        values = base.to_json() | self.architecture
        if isinstance(values["heads"], str):
            values["heads"] = parse_heads(values["heads"])
        if self.heads is not None:
            heads = parse_heads(self.heads)
            if len(heads) != len(values["heads"]):
                raise UserError(
                    f"heads: {self.heads!r} is a schedule for {len(heads)} layers, but {self.model} has "
                    f"{len(values['heads'])}; give one head count per layer"
                )
            values["heads"] = heads
        if vocab_size is not None:
            values["vocab_size"] = vocab_size
        values["classes"] = (classes or 2) if self.task == "classification" else None
        return ModelConfig.from_json(values)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, as written to config.yaml."""
        return dataclasses.asdict(self) | {
            "optimizer": dataclasses.asdict(self.optimizer) | {"betas": list(self.optimizer.betas)}
        }

    def to_yaml(self) -> str:
        """YAML that ``--config`` reads back into an equal RunConfig."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def to_recipe(self) -> str:
        """As to_yaml, but without the recipe's name: what it is written to is a recipe with a name of its own."""
        values = self.to_dict()
        del values["recipe"]
        return yaml.safe_dump(values, sort_keys=False)


def _named_or_trained(name: str) -> ModelConfig:
    """The model of a preset or a file, or the one that the run in a folder has now.

    Raises:
        UserError: unknown preset, a bad file, a folder that is not a run with a checkpoint.
    """
    folder = Path(name)
    if not folder.is_dir():
        return named_model(name)
    hint = "give the folder of a run that has a checkpoint, such as runs/NAME"
    try:
        newest = (folder / "latest").read_text().strip()
    except (OSError, ValueError):
        raise UserError(f"model: {name} holds no checkpoint; {hint}") from None
    state = read_json_object(folder / "checkpoints" / Path(newest).name / "state.json", "model", hint)
    return ModelConfig.from_json(state.get("model", {}))


def is_folder_name(name: str) -> bool:
    """Whether a file system takes *name* as that of one folder, and a terminal shows it."""
    if not name or "/" in name or name.startswith("."):
        return False
    return name.isprintable() and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
