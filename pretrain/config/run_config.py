"""RunConfig: everything that a user asks of a run, filled from a YAML recipe and from command-line flags.

The same names serve in both places: ``optimizer: {learning_rate: 3e-4}`` in a recipe is
``--optimizer.learning_rate 3e-4`` on the command line; flags win. Types and ranges are in the declarations
below, and hold however a RunConfig is made. It is never rewritten: pretrain/run/decisions.py says what
follows from it. Nothing heavy is imported here, so that a typing error is answered at once.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import typing
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from model.config import SCHEDULES, ModelConfig, Size
from model.declared import Count, FromZero, Positive, PositiveNumber, Share, declared, from_plain, to_plain
from model.errors import UserError
from model.heads import HeadSchedule, normalize_heads, parse_heads, parse_schedule
from pretrain.config.lr_rules import parse_rules
from pretrain.config.model_file import check_names, named_model
from pretrain.extensions import sections
from pretrain.utils.files import read_regular
from pretrain.utils.parsing import format_yaml, read_json_object

DEFAULT_RECIPE = "modern-micro"
Beta = Annotated[float, Field(ge=0, lt=1)]
MAX_NAME_BYTES = 200  # file systems take 255; checkpoints and locks add to it
NUM_LAYERS = "num_layers"
"""Of ``architecture``, beside the fields of ModelConfig: changes the depth of a preset."""
_ARCHITECTURE = typing.get_type_hints(ModelConfig, include_extras=True) | {NUM_LAYERS: Size}
"""The type of each of its fields."""


def _normalize_architecture(values: dict[str, Any]) -> dict[str, Any]:
    """The fields as JSON has them, each checked by the declaration of ModelConfig's field of that name."""
    check_names(values, "architecture.", also=(NUM_LAYERS,))
    for name, instead in (("classes", "--task classification"), ("vocab_size", "--vocab_size")):
        if name in values:
            raise UserError(f"architecture.{name}: it comes from the data; leave it out; give {instead}")
    if "heads" in values:
        raise UserError("architecture.heads: this is the setting heads; give heads")
    checked = {}
    for name, value in values.items():
        if name in SCHEDULES and isinstance(value, str):
            value = parse_schedule(value, f"architecture.{name}")
        checked[name] = to_plain(from_plain(_ARCHITECTURE[name], value, section=f"architecture.{name}"))
    return checked


Architecture = Annotated[dict[str, Any], AfterValidator(_normalize_architecture)]
Heads = Annotated[str, BeforeValidator(normalize_heads)]


@declared("optimizer")
class OptimizerConfig:
    """AdamW, decoupled weight decay (Loshchilov & Hutter 2019), alone or beside Muon."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks; AdamW for embeddings, output head, norms and biases."""
    reset: bool = False
    """Lets a run change kind where it continues: the weights stay, the optimizer begins anew. Without effect
    while the kind stays."""
    learning_rate: PositiveNumber = 6.0e-4
    """Peak learning rate, reached at the end of the warmup."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveNumber = 1.0e-8
    """Added to the root of the second moment."""
    weight_decay: FromZero = 0.1
    """Decay of matrices (and embeddings, see decay_embeddings); never of norms and biases. Scaled by the
    rate."""
    decay_embeddings: bool = False
    """Whether token and position embeddings are decayed too (the Prism paper does not say)."""
    gradient_clipping: FromZero = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0 turns clipping off."""


MuonScale = Literal["rms", "spectral", "unit"]


@declared("muon")
class MuonConfig:
    """Muon (Jordan 2024): momentum, made orthogonal by Newton-Schulz iterations; for optimizer.kind muon."""

    heads: Literal["whole", "each"] = "whole"
    """What is made orthogonal: whole matrices, or q, k, v (rows) and o (columns) head by head."""
    scale: MuonScale = "rms"
    """Factor of the orthogonal update of rows x cols: 0.2 sqrt(max(rows, cols)), so that rates of AdamW carry
    over (arXiv 2502.16982); sqrt(rows / cols) (arXiv 2310.17813); or 1."""
    momentum: Beta = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Whether the newest gradient counts once more."""
    learning_rate: PositiveNumber | None = None
    """Peak learning rate of these matrices; optimizer.learning_rate when not given."""


@declared("schedule")
class ScheduleConfig:
    """Learning rate over the run. Numbers below 1 are fractions of the run, others are steps."""

    kind: Literal["cosine", "linear", "wsd"] = "cosine"
    """cosine: half a cosine from the peak to the minimum. linear: a straight line there. wsd: warmup, stable,
    then a linear decay."""
    warmup: FromZero = 0.025
    """Linear warmup, as a fraction of the run (below 1) or in steps."""
    decay: FromZero = 0.2
    """Length of the final decay of wsd, as a fraction of the run (below 1) or in steps; the others ignore
    it."""
    minimum: Share = 0.1
    """Final learning rate as a fraction of the peak (the Prism paper does not state it; 0.1 is nanoGPT's)."""


@declared("validation")
class ValidationConfig:
    """Loss on a fixed set of held-out windows."""

    every: Count = 250
    """Steps between validations; the last step is always validated. 0 turns validation off."""
    sequences: Positive = 256
    """Number of windows, spread evenly over the validation split; fewer if the split is shorter."""
    data: str | None = None
    """Another corpus (or blend) of the same tokenizer, whose validation split is validated on in place of
    data's; all of it where it has no split, as a .bin/.idx pair has none."""


@declared("checkpoint")
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: Count = 500
    """Steps between checkpoints; the last step is always saved. 0 saves the last step only."""
    keep_last: Positive = 2
    """How many of the newest checkpoints to keep."""
    keep_every: Count = 0
    """Checkpoints at multiples of this step are kept for good; 0 keeps none beyond keep_last."""
    background: bool = True
    """Write beside the training: it stops only while tensors are copied to the host's memory, which must have
    room for a rank's share of the checkpoint."""
    mirror: str | None = None
    """Copy checkpoints to a store beside the training: s3://bucket/folder, gs://bucket/folder or
    file:///folder. A local one is deleted only after its copy was verified, and a run whose folder is lost
    goes on from there."""
    mirror_reserve: FromZero = 10.0
    """GiB. With less left on the disk, the oldest checkpoint that is not copied yet is deleted all the same;
    the newest two stay."""


@declared("interruption")
class InterruptionConfig:
    """What ends a session before its last step. Each way, the same command continues the run."""

    minutes: PositiveNumber | None = None
    """Wall-clock budget of a session: after so long the run saves and ends with exit code 75. None sets no
    limit."""
    agreement_seconds: PositiveNumber = 300.0
    """How long a rank that was asked to stop waits for the others to agree; then it ends without saving."""
    hang_minutes: FromZero = 30.0
    """Without progress for so long (a step, a batch of a validation, a checkpoint), every rank writes its
    stacks into the run folder and ends with exit code 76. 0 turns it off."""


@declared("logging")
class LoggingConfig:
    """What is shown while training. metrics.jsonl has a row for every step, whatever these say."""

    every: Positive = 10
    """Steps between reads of the loss from the device (each is a host synchronisation)."""
    seconds: FromZero = 5.0
    """Shortest time between two printed lines when the output is not a terminal."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: as WANDB_MODE says; without it nothing is written. online: offline where nobody is logged in.
    Never asks."""
    wandb_project: str = "head-schedules"
    """Project that runs are filed under."""
    tensorboard: bool = False
    """Whether event files for TensorBoard are written into the run's folder."""


@declared()
class CoreSettings:
    """The settings of a run that are not those of an extension.

    Raises:
        UserError: a field is out of range, or two fields contradict.
    """

    model: str = "prism-micro"
    """Preset (python -m pretrain.presets lists them), the path of a JSON file holding a ModelConfig, or a
    run's folder, whose newest checkpoint's model is trained again from the start."""
    heads: Heads | None = None
    """Head schedule in place of the preset's, such as 3x2,6x2,8x2,12x6 or a list; one head count per
    layer."""
    architecture: Architecture = field(default_factory=dict)
    """Fields of ModelConfig that replace the preset's, such as {norm: layernorm, context_length: 512}, and
    num_layers: another number of layers, with heads for each."""
    data: str = "builtin"
    """builtin (the running Python's standard library), a prepared corpus folder, the prefix of a .bin/.idx
    pair of Megatron's tools, or a blend a:0.7,b:0.3."""
    document_mask: bool = False
    """Keep the documents of a window apart: no attention from one to another, positions beginning anew in
    each, in training and validation. Fixed for the whole run."""
    tokenizer: str | None = None
    """Tokenizer folder, SentencePiece .model file or hub name, for .bin/.idx pairs: they do not say theirs.
    Corpus folders bring their own, and another is refused."""
    data_root: str = "data"
    """Where the built-in corpus is written, once."""
    vocab_size: Positive = 4096
    """Entries of the tokenizer that is trained for the built-in text; prepared corpora bring their own."""
    seed: Count = 1
    """Seeds the weights and the order of the data."""
    steps: Positive = 1000
    """Optimizer steps in the whole run."""
    global_batch_tokens: Positive = 262144
    """Tokens per optimizer step over all ranks; a multiple of the context length."""
    micro_batch: Positive | None = None
    """Sequences per rank and forward pass; chosen from the device's memory when not given."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_rules: list[Any] = field(default_factory=list)
    """Parameters whose learning rate leaves the schedule, first match wins: [{name: slow, parameters: [q, k],
    layers: upper_half, scale: 0.25, hold: 0.04, ramp: 0.01}], or names: [upper_qk]. See
    docs/learning_rates.md."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    interruption: InterruptionConfig = field(default_factory=InterruptionConfig)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """What "auto" in the ds_config's bf16 means; auto: bf16 where the device computes in it, else fp32."""
    tensor_parallel: Positive = 1
    """t: ranks that share one copy of the model, neighbours; divides the number of ranks and the model's
    widths."""
    sequence_parallel: bool = False
    """With tensor_parallel: cut hidden states between its layers along T. Less memory; the same bytes
    travel."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more computation."""
    compile: Literal["auto", True, False] = "auto"
    """Compile the model with torch.compile: slower to start, faster steps, ZeRO stages 1 and 2 only. auto: on
    GPUs, and on CPUs for runs of some minutes. What a run began with is kept when it is resumed."""
    fused: Literal["auto", "all", "loss", "none"] = "auto"
    """Which products are fused. loss: the output head and the loss, where tensor_parallel is 1, which saves
    the memory of the logits. all: also q, k and v, and gate and up, not at ZeRO stage 3. none: each by
    itself. auto: all where a GPU's model is compiled, else loss. Only rounding changes; what a run began with
    is kept when it is resumed."""
    attention: Literal["auto", "blocks", "torch"] = "auto"
    """How attention is computed. torch: by torch's kernels. blocks: by products over blocks of queries, which
    is faster on a CPU in bf16, and rounds more. auto: blocks there up to 512 tokens, else torch. What a run
    began with is kept when it is resumed."""
    threads: Positive | None = None
    """CPU threads per rank; the cores are shared among the ranks when not given. Kept when a run is
    resumed."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (CUDA; CPU kernels are deterministic already)."""
    max_skipped_steps: Positive = 10
    """Consecutive updates skipped for a non-finite loss or gradient, or as spikes, after which the run
    stops."""
    skip_spikes: FromZero = 0.0
    """Skip updates whose loss or gradient norm lies so many standard deviations above the last 128 steps
    (OLMo: 6); 0 skips none."""
    name: str | None = None
    """Name of the run folder; RECIPE-MODEL-sSEED when not given."""
    runs_dir: str = "runs"
    """Where run folders are made."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest valid checkpoint of the run folder. never: refuse a folder that has
    one."""
    recipe: str = DEFAULT_RECIPE
    """Name of the recipe this configuration came from; set by --config, part of the run's name."""

    def __post_init__(self) -> None:
        for rule in parse_rules(self.lr_rules):
            valid = ["hold", *(release for section in sections() for release in section.releases())]
            if rule.release not in valid:
                raise UserError(
                    f"lr_rules.{rule.name}.release: {rule.release!r} is not valid; give one of "
                    f"{', '.join(valid)}"
                )
        if self.optimizer.kind != "muon" and self.muon != MuonConfig():
            raise UserError(
                f"muon: given with optimizer.kind: {self.optimizer.kind}, which does not read it; leave "
                "muon.* out (--config micro is a recipe of AdamW), or give --optimizer.kind muon"
            )
        for section in sections():
            section.check(self)
        for field_name, folder_name in (("name", self.name), ("recipe", self.recipe)):
            if folder_name is not None and not is_folder_name(folder_name):
                raise UserError(
                    f"{field_name}: {folder_name[:80]!r} is not valid; give one folder name of at most "
                    f"{MAX_NAME_BYTES} bytes, without '/' or control characters and not starting with '.'"
                )

    @property
    def run_name(self) -> str:
        """Name of the run folder: ``name``, or RECIPE-MODEL-RULES-sSEED, where RULES are the learning-rate
        rules."""
        rules = "".join(f"-{rule.name}" for rule in parse_rules(self.lr_rules))
        return self.name or f"{self.recipe}-{Path(self.model).stem}{rules}-s{self.seed}"

    @property
    def folder(self) -> Path:
        """The run folder, ``runs_dir/run_name``."""
        return Path(self.runs_dir) / self.run_name

    def build_model_config(self, vocab_size: int | None = None, **from_data: Any) -> ModelConfig:
        """The model of step 0, which extensions may make of fixed_model_config.

        Args:
            vocab_size: of the data's tokenizer, if it is known.
            from_data: other fields that the data determine.

        Raises:
            UserError: as fixed_model_config, and if an extension cannot begin with that model.
        """
        model = self.fixed_model_config(vocab_size, **from_data)
        for section in sections():
            model = section.first_model(self, model)
        return model

    def largest_model_config(self, model: ModelConfig) -> ModelConfig:
        """The largest that *model* may become while it trains. Memory, batch and buckets are planned for
        it."""
        for section in sections():
            model = section.largest_model(self, model)
        return model

    def fixed_model_config(self, vocab_size: int | None = None, **from_data: Any) -> ModelConfig:
        """The preset with ``architecture``, ``heads`` and what comes from the data in place.

        Raises:
            UserError: unknown preset or field, a schedule of the wrong length, or values that do not fit
                together.
        """
        base = _named_or_trained(self.model)
        architecture = dict(self.architecture)
        layers = architecture.pop(NUM_LAYERS, base.num_layers)
        values = base.to_json() | architecture | {"heads": self._heads(base, layers), "classes": None}
        if vocab_size is not None:
            values["vocab_size"] = vocab_size
        return ModelConfig.from_json(values | from_data)

    def _heads(self, base: ModelConfig, layers: int) -> HeadSchedule:
        """The head schedule of ``heads``, or that of *base*, whose only head count any number of layers can
        have."""
        if self.heads is None and len(set(base.heads)) == 1:
            return base.heads[:1] * layers
        heads = base.heads if self.heads is None else parse_heads(self.heads)
        if len(heads) == layers:
            return heads
        if self.heads is None:
            raise UserError(
                f"heads: missing; {self.model} has {len(heads)} layers of different head counts, and "
                f"architecture.{NUM_LAYERS} is {layers}; give {layers} head counts"
            )
        raise UserError(
            f"heads: {self.heads!r} is a schedule for {len(heads)} layers, but {self.model} has {layers}; "
            f"give one head count per layer, or architecture.{NUM_LAYERS} {len(heads)} as well"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, as written to config.yaml."""
        return dataclasses.asdict(self) | {
            "optimizer": dataclasses.asdict(self.optimizer) | {"betas": list(self.optimizer.betas)}
        }

    def to_yaml(self) -> str:
        """YAML that ``--config`` reads back into an equal RunConfig."""
        return format_yaml(self.to_dict())

    def to_recipe(self) -> str:
        """As to_yaml, but without the recipe's name: what it is written to is a recipe with a name of its
        own."""
        values = self.to_dict()
        del values["recipe"]
        return format_yaml(values)


if TYPE_CHECKING:

    class RunConfig(CoreSettings):
        """The settings of a run: the core's, and those that each extension adds."""

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    RunConfig = declared()(
        type("RunConfig", (*sections(), CoreSettings), {"__doc__": "The settings of a run."})
    )


def _named_or_trained(name: str) -> ModelConfig:
    """The model of a preset or a file, or the one that the run in a folder has now.

    Raises:
        UserError: unknown preset, a bad file, a folder that is not a run with a checkpoint.
    """
    folder = Path(name)
    if not os.path.isdir(name):  # noqa: PTH112 — no error for a name that is too long
        return named_model(name)
    hint = "give the folder of a run that has a checkpoint, such as runs/NAME"
    try:
        newest = read_regular(folder / "latest", 1000).decode("utf-8").strip()
    except (OSError, ValueError):
        if (folder / "config.json").exists():
            hint = f"import it: python -m pretrain.convert --from_hf {shlex.quote(name)} --out runs/NAME"
        raise UserError(f"model: {name} holds no checkpoint; {hint}") from None
    state = read_json_object(folder / "checkpoints" / Path(newest).name / "state.json", "model", hint)
    return ModelConfig.from_json(state.get("model", {}))


def group_and_seed(name: str) -> tuple[str, str]:
    """Split ``tiny-prism-tiny-s3`` into ``tiny-prism-tiny`` and ``3``; a name without a seed is its own
    group."""
    match = re.fullmatch(r"(.+?)[-_]?s(\d+)", name)
    return (match[1], match[2]) if match else (name, "")


def is_folder_name(name: str) -> bool:
    """Whether a file system takes *name* as that of one folder, and a terminal shows it."""
    if not name or "/" in name or name.startswith("."):
        return False
    return name.isprintable() and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
