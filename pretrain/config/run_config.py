"""RunConfig: all settings of a run, filled from a YAML recipe and from command-line flags.

The same names serve in both places: ``optimizer: {learning_rate: 3e-4}`` in a recipe is
``--optimizer.learning_rate 3e-4`` on the command line; flags win. Types and ranges are in the declarations
below, and are checked however a RunConfig is made. It is never rewritten: pretrain/run/decisions.py derives
decisions from it. Nothing heavy is imported here, so that a typing error is reported at once.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from model.allocations import MULTIPLE, Allocation, describe_share, parse_allocation
from model.config import ModelConfig
from model.declared import NonNegativeFloat, NonNegativeInt, PositiveInt, declared, from_dict, to_dict
from model.errors import UserError, quote
from model.heads import HeadSchedule, normalize_heads, parse_heads
from model.schedules import Size
from pretrain.config.growth import GrowthConfig
from pretrain.config.lr_rules import LearningRateRule, parse_rules
from pretrain.config.model_file import check_names, load_model
from pretrain.config.sections import (
    CheckpointConfig,
    DiagnosticsConfig,
    EvaluationConfig,
    InterruptionConfig,
    LLRConfig,
    LoggingConfig,
    MaturityConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    ValidationConfig,
    length_in_steps,
    phase_in_steps,
    step_of_run,
)
from pretrain.utils.parsing import format_yaml

DEFAULT_RECIPE = "modern-micro"
MAX_NAME_BYTES = 200  # file systems take 255; checkpoints and locks add to it
INITIAL_MODEL, IMPORTED_MODEL = "initial_model.json", "model.json"
"""In a run's folder: the model of what it began with (init_from), which may be gone when it is resumed."""
NUM_LAYERS = "num_layers"
"""Key of ``architecture`` besides the fields of ModelConfig; changes the depth of a preset."""
LENGTHS = ("llr.every", "llr.transition", "maturity.every", "growth.interval")
"""Settings that are fractions of the run or whole numbers of steps, whether they are used or not."""
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
        found = from_dict(_ARCHITECTURE[name], value, section=f"architecture.{name}")
        checked[name] = found.text if isinstance(found, Allocation) else to_dict(found)
    return checked


Architecture = Annotated[dict[str, Any], AfterValidator(_normalize_architecture)]
Heads = Annotated[str, BeforeValidator(normalize_heads, json_schema_input_type=str | list[NonNegativeInt])]


def _read_rules(value: Any) -> Any:
    return parse_rules(value) if isinstance(value, list | tuple) else value


def _split(value: Any) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    return tuple(value) if isinstance(value, list) else value


Rules = Annotated[
    tuple[LearningRateRule, ...],
    BeforeValidator(_read_rules, json_schema_input_type=list[LearningRateRule | str]),
]
HookNames = Annotated[tuple[str, ...], BeforeValidator(_split, json_schema_input_type=list[str] | str)]


@declared()
class RunConfig:
    """The settings of a run.

    Raises:
        UserError: a field is out of range, or two fields contradict.
    """

    task: Literal["language", "classification"] = "language"
    """language predicts the next token; classification predicts the class of a whole sequence, at its end.
    It needs a labelled corpus as data (head-schedules prepare labelled)."""

    model: str = "prism-micro"
    """Preset (head-schedules presets lists them), the path of a JSON file holding a ModelConfig, or a
    run's folder, whose newest checkpoint's model is trained again from the start."""
    init_from: str | None = None
    """Begin a new run with the weights of another, RUN or RUN:STEP, or of a Hugging Face folder, and with a
    new optimizer state. The model is then the source's unless model is given. See docs/huggingface.md."""
    heads: Heads | None = None
    """Head schedule in place of the preset's, such as 3x2,6x2,8x2,12x6 or a list; one head count per
    layer."""
    architecture: Architecture = field(default_factory=dict)
    """Fields of ModelConfig that replace the preset's, such as {norm: layernorm, context_length: 512}, and
    num_layers: another number of layers, with heads for each. Each is also a flag, --architecture.FIELD
    VALUE; head-schedules presets NAME --json prints them."""
    data: str = "builtin"
    """builtin (the running Python's standard library), a prepared corpus folder, the prefix of a .bin/.idx
    pair of Megatron's tools, or a blend a:0.7,b:0.3."""
    document_mask: bool = False
    """Keep the documents of a window separate, in training and validation: attention does not cross document
    boundaries, and positions restart at each. Fixed for the whole run."""
    tokenizer: str | None = None
    """Tokenizer folder, SentencePiece .model file or hub name of .bin/.idx pairs, which do not contain one.
    For a corpus folder, a tokenizer that differs from its own is rejected."""
    data_root: str = "data"
    """Folder that the built-in corpus is written to, once."""
    vocab_size: PositiveInt = 4096
    """Entries of the tokenizer that is trained for the built-in text; prepared corpora bring their own."""
    seed: NonNegativeInt = 1
    """Seeds the weights and the order of the data."""
    steps: PositiveInt = 1000
    """Optimizer steps in the whole run."""
    global_batch_tokens: PositiveInt = 262144
    """Tokens per optimizer step over all ranks; a multiple of the context length."""
    micro_batch: PositiveInt | None = None
    """Sequences per rank and forward pass; chosen from the device's memory when not given."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_rules: Rules = ()
    """Parameters whose learning rate leaves the schedule, first match wins: [{name: slow, parameters: [q, k],
    layers: upper_half, scale: 0.25, hold: 0.04, ramp: 0.01}], or names: [upper_qk]. See
    docs/learning_rates.md."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    """Heads that are added and pruned while the model trains. See docs/growth.md."""
    diagnostics_every: NonNegativeInt = 250
    """Steps between measurements of attention, residual writes and the movement of weights; 0 turns them
    off."""
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    maturity: MaturityConfig = field(default_factory=MaturityConfig)
    llr: LLRConfig = field(default_factory=LLRConfig)
    """Learning rates that follow the spectra of the weights. See docs/learning_rates.md."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    interruption: InterruptionConfig = field(default_factory=InterruptionConfig)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Value of "auto" in the ds_config's bf16 block. auto is bf16 where the device computes in it, else
    fp32."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel degree t, the number of neighbouring ranks that share one copy of the model. It must
    divide the number of ranks and the model's widths."""
    sequence_parallel: bool = False
    """With tensor_parallel, also partition hidden states along the sequence. It saves memory and sends the
    same number of bytes."""
    context_parallel: PositiveInt = 1
    """Context-parallel degree c, the number of ranks that share each sequence, for long contexts. c times
    tensor_parallel must divide the number of ranks, and 2c the context length. See
    docs/context_parallelism.md."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass, which saves memory and costs about a third more
    computation."""
    compile: Literal["auto", True, False] = "auto"
    """Compile the model with torch.compile, at ZeRO stages 1 and 2 only: the start is slower, steps are
    faster. auto compiles on GPUs, and on CPUs for runs of some minutes. A resumed run keeps its first
    choice."""
    fused: Literal["auto", "all", "loss", "none"] = "auto"
    """Which products are fused. loss fuses the LM head and the loss where tensor_parallel is 1, which saves
    the memory of the logits. all also fuses q, k and v, and gate and up; not at ZeRO stage 3. none fuses
    nothing. auto is all where a GPU's model is compiled, else loss. Only rounding changes. A resumed run
    keeps its first choice."""
    attention: Literal["auto", "blocks", "torch"] = "auto"
    """How attention is computed. torch uses torch's kernels. blocks multiplies blocks of queries, which is
    faster on a CPU in bf16 and rounds more. auto is blocks there up to 512 tokens without
    document masks, else torch. A resumed run keeps its first choice."""
    threads: PositiveInt | None = None
    """CPU threads per rank; by default the cores are divided among the ranks. A resumed run keeps its first
    choice."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (CUDA; CPU kernels are deterministic already)."""
    max_skipped_steps: PositiveInt = 10
    """Consecutive updates skipped for a non-finite loss or gradient, or as spikes, after which the run
    stops."""
    skip_spikes: NonNegativeFloat = 0.0
    """Skip updates whose loss or gradient norm is this many standard deviations above the mean of the last
    128 steps (OLMo: 6); 0 skips none."""
    profile: str | None = None
    """Steps to trace with torch.profiler, FIRST:LAST, both included, such as 10:12. A trace for each rank is
    written into the run folder's profile/, on a GPU with a snapshot of its memory."""
    hooks: HookNames = ()
    """Your own hooks, as module:class, such as my_module:MyHook; only training imports them. See
    docs/architecture.md."""
    name: str | None = None
    """Name of the run folder. By default RECIPE-MODEL-sSEED, with lr_rules, llr.apply and growth.criterion
    before the seed; heads and other settings are not part of it, so name such runs."""
    runs_dir: str = "runs"
    """Folder in which run folders are created."""
    resume: Literal["auto", "never"] = "auto"
    """auto resumes from the newest valid checkpoint of the run folder; never rejects a folder that has one,
    except in a job that SLURM starts again."""
    recipe: str = DEFAULT_RECIPE
    """Name of the recipe this configuration came from; set by --config, part of the run's name."""

    def __post_init__(self) -> None:
        if self.optimizer.kind != "muon" and self.muon != MuonConfig():
            raise UserError(
                f"muon: given with optimizer.kind: {self.optimizer.kind}, which does not read it; leave "
                "muon.* out (--config micro is a recipe of AdamW), or give --optimizer.kind muon"
            )
        if self.diagnostics.release is not None:
            step_of_run("diagnostics.release", self.diagnostics.release, self.steps)
        for name in LENGTHS:
            length_in_steps(name, attrgetter(name)(self), self.steps)
        phase_in_steps("llr.until", self.llr.until, self.steps)
        phase_in_steps("growth.until", self.growth.until, self.steps)
        if self.growth.active and self.heads is not None:
            raise UserError(
                f"heads: {self.heads!r} contradicts growth.criterion {self.growth.criterion}, which finds "
                "the heads; leave one out"
            )
        if self.attention == "blocks" and self.document_mask:
            raise UserError("attention: blocks does not go with document_mask; give torch, or leave one out")
        if self.task == "classification":
            self._check_classification()
        self.profiled_steps()
        for hook in self.hooks:
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", hook):
                raise UserError(
                    f"hooks: {quote(hook)} is not valid; give module:class, such as my_module:MyHook"
                )
        for field_name, folder_name in (("name", self.name), ("recipe", self.recipe)):
            if folder_name is not None and not is_folder_name(folder_name):
                raise UserError(
                    f"{field_name}: {folder_name[:80]!r} is not valid; give one folder name of at most "
                    f"{MAX_NAME_BYTES} bytes, without '/' or control characters and not starting with '.'"
                )

    def _check_classification(self) -> None:
        for name, given, reason in (
            ("document_mask", self.document_mask, "every example is a separate sequence"),
            ("sequence_parallel", self.sequence_parallel, "the head reads one position of each sequence"),
            (
                "context_parallel",
                self.context_parallel if self.context_parallel > 1 else None,
                "the head reads one position of each sequence",
            ),
            ("evaluation.every", self.evaluation.every, "its tasks need a language model"),
            ("validation.data", self.validation.data, "a labelled corpus has its own validation examples"),
            ("tokenizer", self.tokenizer, "a labelled corpus brings its own"),
        ):
            if given:
                raise UserError(
                    f"{name}: {given} does not go with --task classification: {reason}; leave it out"
                )

    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last of the steps to trace, counted from 1; None if none are.

        Raises:
            UserError: ``profile`` is no range of the run's steps.
        """
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", self.profile, re.ASCII)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= first <= last <= self.steps:
            raise UserError(
                f"profile: {quote(self.profile)} is not valid; give FIRST:LAST, steps of the run from 1 to "
                f"{self.steps:,}, such as 10:12"
            )
        return first, last

    @property
    def model_name(self) -> str:
        """``model`` without the folders before it; a file's without its ending."""
        return Path(self.model).name.removesuffix(".json")

    @property
    def run_name(self) -> str:
        """Name of the run folder: ``name``, or RECIPE-MODEL-RULES-sSEED, where RULES are the learning-rate
        rules and the criterion of growth."""
        model = self.model_name.replace(":", "-")  # of RUN:STEP
        rules = "".join(f"-{rule.name}" for rule in self.lr_rules)
        rules += f"-llr_{self.llr.apply}" if self.llr.active else ""
        rules += f"-growth_{self.growth.criterion}" if self.growth.active else ""
        return self.name or f"{self.recipe}-{model}{rules}-s{self.seed}"

    def unused_settings(self) -> list[str]:
        """A note for each section that is given and not read, since it is turned off."""
        notes = []
        for section, switch, config in (("growth", "criterion", self.growth), ("llr", "apply", self.llr)):
            values, defaults = to_dict(config), to_dict(type(config)())
            given = [f"{section}.{name}" for name in values if values[name] != defaults[name]]
            if given and not config.active:
                notes.append(f"{', '.join(given)}: not used, since {section}.{switch} is none")
        return notes

    @property
    def folder(self) -> Path:
        """The run folder, ``runs_dir/run_name``."""
        return Path(self.runs_dir) / self.run_name

    def build_model_config(self, vocab_size: int | None = None, **from_data: Any) -> ModelConfig:
        """The model of step 0: with growth, the one that it starts with; else fixed_model_config.

        Args:
            vocab_size: of the data's tokenizer, if it is known.
            from_data: other fields that the data determine.

        Raises:
            UserError: as fixed_model_config, and if growth cannot begin with that model.
        """
        model = self.fixed_model_config(vocab_size, **from_data)
        if self.task == "classification":  # as many classes as the data have; until they are known, two
            model = model.replace(classes=model.classes or 2)
        return (
            self.growth.start_model(model, self.steps, self.tensor_parallel) if self.growth.active else model
        )

    def most_heads(self) -> int:
        """Most heads of a layer that growth may reach."""
        return self.growth.maximum or max(self.fixed_model_config().heads)

    def largest_model_config(self, model: ModelConfig) -> ModelConfig:
        """The largest that *model* may become while it trains. Memory, batch and buckets are planned for
        it."""
        if not self.growth.active:
            return model
        return model.replace(heads=tuple(max(heads, self.most_heads()) for heads in model.heads))

    def fixed_model_config(self, vocab_size: int | None = None, **from_data: Any) -> ModelConfig:
        """The preset with ``architecture``, ``heads`` and what comes from the data in place.

        Raises:
            UserError: unknown preset or field, a schedule of the wrong length, or values that do not fit
                together.
        """
        base = self._base_model()
        architecture = dict(self.architecture)
        layers = architecture.pop(NUM_LAYERS, base.num_layers)
        values = base.to_json() | architecture | {"heads": self._heads(base, layers), "classes": None}
        if self.growth.active and self.growth.head_dim is not None:
            values["head_dim"] = (self.growth.head_dim,) * layers
        if vocab_size is not None:
            values["vocab_size"] = vocab_size
        return ModelConfig.from_json(values | from_data)

    def describe_budgets(self, model: ModelConfig) -> list[str]:
        """A line for every allocation whose widths are not the uniform model's in sum, for want of a smaller
        multiple."""
        lines = []
        given = {"heads": self.heads, **self.architecture}
        for name, blocks in (("heads", None), ("ffn_width", False), ("block_width", True)):
            if isinstance(text := given.get(name), str) and "(" in text:
                allocation = parse_allocation(text, 1 if blocks is None else MULTIPLE, blocks=bool(blocks))
                widths = allocation.widths(model.num_layers, model.d_model)
                if name == "ffn_width" and model.block_width is not None:
                    lines += _describe_ffns(model, allocation.mean)
                elif excess := allocation.describe_excess(widths, model.d_model):
                    why = f"{text} is rounded to multiples of {allocation.multiple}"
                    if blocks and allocation.seed is not None:
                        why += ", and how many are without effect depends on the order"
                    lines.append(f"the {len(widths)} layers' {name} {excess}: {why}")
        return lines

    def _base_model(self) -> ModelConfig:
        """What ``model`` names. A run that has begun with the model of ``init_from`` keeps it in its folder:
        it does not need the source any more."""
        weights = self.init_from is not None and self.model == self.init_from
        kept = self.folder / INITIAL_MODEL
        return load_model(str(kept) if weights and kept.is_file() else self.model, weights)

    def _heads(self, base: ModelConfig, layers: int) -> HeadSchedule:
        """The head schedule of ``heads``, or that of *base*, whose only head count any number of layers can
        have; with growth its largest."""
        if self.heads is None and (
            len(set(base.heads)) == 1 or (self.growth.active and layers != base.num_layers)
        ):
            return (max(base.heads),) * layers
        heads = base.heads if self.heads is None else parse_heads(self.heads, layers)
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
        return {name: _tuples_as_lists(value) for name, value in dataclasses.asdict(self).items()}

    def to_yaml(self) -> str:
        """YAML that ``--config`` reads back into an equal RunConfig."""
        return format_yaml(self.to_dict())

    def to_recipe(self) -> str:
        """As to_yaml, but without the recipe's name: the file that it is written to is a new recipe."""
        values = self.to_dict()
        del values["recipe"]
        return format_yaml(values)


def _describe_ffns(model: ModelConfig, mean: int) -> list[str]:
    """By how much the parameters of FFNs, which follow the products of FFN and block widths, exceed those of
    uniform ones of a *mean* width; nothing if they do not."""
    layers = range(model.num_layers)
    found = sum(model.layer_width(layer) * model.layer_ffn_width(layer) for layer in layers)
    excess = describe_share(found / (model.num_layers * model.d_model * mean))
    return [f"the FFNs have {excess} of {mean:,}: they follow block_width x ffn_width"] if excess else []


def _tuples_as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples_as_lists(inner) for name, inner in value.items()}
    return [_tuples_as_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def split_run_name(name: str) -> tuple[str, str]:
    """Split ``tiny-prism-tiny-s3`` into ``tiny-prism-tiny`` and ``3``; a name without a seed is its own
    group."""
    match = re.fullmatch(r"(.+?)[-_]s(\d+)", name)
    return (match[1], match[2]) if match else (name, "")


def is_folder_name(name: str) -> bool:
    """Whether a file system takes *name* as that of one folder, and a terminal shows it."""
    if not name or "/" in name or name.startswith("."):
        return False
    return name.isprintable() and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
