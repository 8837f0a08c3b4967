"""Learning-rate rules: which parameters leave the base schedule, for how long, and by how much.

    lr_rules:
      - {name: upper_qk, parameters: [q, k], layers: upper_half, scale: 0.25, hold: 0.04, ramp: 0.01}

lr(group, step) = base schedule(step) x multiplier(group, step). The first rule that matches a parameter is
its rule; parameters that none matches follow the base schedule. pretrain/optim/schedule.py says what the
multiplier is at each step, pretrain/optim/groups.py what the optimizer's groups are. Nothing heavy is
imported here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from model.declared import NonNegativeFloat, declared, from_dict
from model.errors import UserError, quote, suggest

if TYPE_CHECKING:
    from model.parameters import ParameterRole

PARTS = ("q", "k", "v", "o", "gate", "head_gate", "ffn", "norm", "embedding", "output")
LAYER_WORDS = ("all", "upper_half", "lower_half")
BASE = "base"
LATEST = 0.12
_UPPER_QK = {"parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "ramp": 0.01}

# The intervention of arXiv 2605.10504, by name: `lr_rules: [upper_qk]`. A quarter of the rate for 4 % of the
# steps, then back over 1 %. The second ends it when the lower half has settled
# (pretrain/diagnostics/maturity.py), at 12 % at the latest.
NAMED_RULES: dict[str, dict[str, Any]] = {
    "upper_qk": _UPPER_QK | {"hold": 0.04},
    "upper_qk_maturity": _UPPER_QK | {"release": "maturity", "latest": LATEST},
}


@declared("lr_rules")
class LearningRateRule:
    """One rule. Lengths below 1 are fractions of the run, others are steps.

    ``upper_qk`` above is the rule of arXiv 2605.10504. That paper leaves open what becomes of the biases of q
    and k (here: nothing, see ``biases``) and of their weight decay (here: it slows down too, see
    ``decay_with_lr``).
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Names the optimizer groups, the logs' ``lr/NAME/decay`` and what checkpoints restore; letters, digits,
    _ . -"""
    parameters: Annotated[tuple[str, ...], Field(min_length=1)]
    """q, k, v, o, gate and head_gate (of attention), ffn, norm, embedding (tokens and positions), output (an
    untied head), or patterns of full parameter names such as ``layers.*.attention.q.weight``. A part means
    its matrices; norm its weights and biases."""
    scale: NonNegativeFloat
    """Factor of the base learning rate while the rule holds: above 0, or 0 with freeze: true."""
    layers: Annotated[tuple[int | str, ...], Field(min_length=1)] = ("all",)
    """all; upper_half (2 l >= L, l from 0) or lower_half; layers and ranges with both ends: ``6-11``, ``[0,
    2, 6-11]``. Only all includes what lies outside the layers: embeddings, the final norm, the output
    head."""
    hold: NonNegativeFloat | None = None
    """How long it holds; to the end of the run when not given. With ``release: maturity`` the shortest
    time."""
    ramp: NonNegativeFloat = 0.0
    """Length over which the factor then returns to 1, in equal steps; 0 is at once."""
    release: Literal["hold", "maturity"] = "hold"
    """When the rule ends: hold ends it after the hold, maturity when the lower half of the layers has
    settled (diagnostics/maturity.py)."""
    latest: NonNegativeFloat | None = None
    """With another release than hold: when it is forced (12 % of the run; arXiv 2605.10504)."""
    depth_decay: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Geometric decay by depth: the factor is scale x depth_decay^i in the i-th layer above the rule's lowest
    one."""
    freeze: bool = False
    """Do not train these parameters while the rule holds: a factor of 0, no update and no decay."""
    decay_with_lr: bool = True
    """true scales weight decay by the group's learning rate, as AdamW does, so that a slowed parameter is
    decayed less; false scales it by the base learning rate, as if there were no rule. The paper does not say
    which it used."""
    biases: bool = False
    """Whether a part's biases (of the linear layers) follow the rule too; the paper names the projections
    W_Q, W_K."""

    def __post_init__(self) -> None:
        where = f"lr_rules.{self.name}"
        if self.name == BASE:
            raise UserError(f"lr_rules.name: {BASE!r} is what matches no rule; give another name")
        for entry in self.parameters:
            if entry not in PARTS and not set(entry) & set("*?[."):
                hint = suggest(entry, PARTS) or f"; valid are {', '.join(PARTS)}"
                raise UserError(
                    f"{where}.parameters: {quote(entry)} is unknown{hint}, or a pattern such as "
                    "*.attention.q.*"
                )
        for layer in self.layers:
            if not (layer in LAYER_WORDS and len(self.layers) == 1):
                first, last = _range(layer, where)
                if last < first:
                    raise UserError(
                        f"{where}.layers: {quote(layer)} ends before it begins; write {last}-{first}"
                    )
        self._check_factor(where)
        if self.release == "maturity" and self.latest is None:
            object.__setattr__(self, "latest", LATEST)
        if self.release == "hold" and self.latest is not None:
            raise UserError(f"{where}.latest: it is for release: maturity; leave it out")
        if self.release == "hold" and self.hold is None and self.ramp:
            raise UserError(f"{where}.ramp: without a hold the rule never ends; give hold, or leave ramp out")

    def _check_factor(self, where: str) -> None:
        if not self.freeze and self.scale == 0:
            raise UserError(
                f"{where}.scale: 0 is not valid; give a positive number (freeze: true stops these parameters)"
            )
        if self.freeze and (self.scale != 0 or self.depth_decay != 1 or not self.decay_with_lr):
            raise UserError(
                f"{where}.freeze: true goes with no scale, no depth_decay and no decay_with_lr: false; leave "
                "one of them out"
            )

    def layer_set(self, num_layers: int) -> frozenset[int] | None:
        """The layers that the rule selects, of *num_layers*; None is all and what lies outside of them.

        Raises:
            UserError: a layer outside the model.
        """
        if self.layers == ("all",):
            return None
        if self.layers in (("upper_half",), ("lower_half",)):
            upper = self.layers == ("upper_half",)
            return frozenset(l for l in range(num_layers) if (2 * l >= num_layers) == upper)  # noqa: E741
        selected: set[int] = set()
        for entry in self.layers:
            first, last = _range(entry, f"lr_rules.{self.name}")
            if last >= num_layers:
                raise UserError(
                    f"lr_rules.{self.name}.layers: layer {last} is outside the model, whose layers are "
                    f"0 to {num_layers - 1}"
                )
            selected |= set(range(first, last + 1))
        return frozenset(selected)

    def matches(self, name: str, role: ParameterRole, layers: frozenset[int] | None) -> bool:
        """Whether the rule selects a parameter, by its name, its role and the result of ``layer_set``."""
        if layers is not None and role.layer not in layers:
            return False
        is_bias = role.kind == "bias" and role.part != "norm"
        return any(
            role.part == entry and (self.biases or not is_bias)
            if entry in PARTS
            else fnmatch.fnmatchcase(name, entry)
            for entry in self.parameters
        )


def parse_rules(entries: Sequence[Any]) -> tuple[LearningRateRule, ...]:
    """Read the rules of a recipe: mappings with the fields of LearningRateRule, names in NAMED_RULES, or
    rules.

    Raises:
        UserError: an unknown key or name, a value that is not valid, two rules of one name.
    """
    rules = [_parse_rule(entry, index) for index, entry in enumerate(entries)]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"lr_rules: two rules are called {quote(name)}; give each its own name")
    return tuple(rules)


def match_rules(
    rules: Sequence[LearningRateRule], roles: Mapping[str, ParameterRole], num_layers: int
) -> dict[str, LearningRateRule | None]:
    """Assign every parameter its rule, or None where the base schedule applies.

    Raises:
        UserError: a rule matches no parameter of the model, or only some that earlier rules have taken; a
            layer is outside the model; depth_decay is given for parameters outside the layers.
    """
    rule_of: dict[str, LearningRateRule | None] = dict.fromkeys(roles)
    for rule in rules:
        layers = rule.layer_set(num_layers)
        matching = [name for name, role in roles.items() if rule.matches(name, role, layers)]
        if not matching:
            parts = ", ".join(sorted({role.part for role in roles.values()}))
            raise UserError(
                f"lr_rules.{rule.name}: parameters {_join_entries(rule.parameters)} in layers "
                f"{_join_entries(rule.layers)} "
                f"of {num_layers} match nothing; the model has {parts}; its first parameter is called "
                f"{next(iter(roles))}"
            )
        unassigned = [name for name in matching if rule_of[name] is None]
        if not unassigned:
            takers = list(dict.fromkeys(taken.name for name in matching if (taken := rule_of[name])))
            raise UserError(
                f"lr_rules.{rule.name}: every parameter it matches is taken by {' and '.join(takers)} "
                "before it (the first match wins); move it before them, or remove it"
            )
        outside = [name for name in unassigned if roles[name].layer is None]
        if rule.depth_decay != 1 and outside:
            raise UserError(
                f"lr_rules.{rule.name}.depth_decay: {outside[0]} lies outside the layers and has no depth; "
                "name layers, or other parameters"
            )
        rule_of.update(dict.fromkeys(unassigned, rule))
    return rule_of


# ---------------------------------------------------------------------- reading


def _parse_rule(entry: Any, index: int) -> LearningRateRule:
    where = f"lr_rules[{index}]"
    if isinstance(entry, LearningRateRule):
        return entry
    if isinstance(entry, str):
        if entry not in NAMED_RULES:
            hint = suggest(entry, NAMED_RULES) or f"; known are {', '.join(NAMED_RULES)}"
            raise UserError(f"{where}: there is no rule called {quote(entry)}{hint}, or write a mapping")
        entry = {"name": entry, **NAMED_RULES[entry]}
    if not isinstance(entry, Mapping):
        raise UserError(
            f"{where}: {quote(entry)} is not a rule; write a mapping with name, parameters, layers and scale"
        )
    values = {key: value for key, value in entry.items() if value is not None}
    name = values.get("name")
    section = f"lr_rules.{name}" if isinstance(name, str) and name.isprintable() else where
    for key in ("parameters", "layers"):  # one in place of a list of one
        value = values.get(key)
        if isinstance(value, str):
            values[key] = [part.strip() for part in value.split(",")] if key == "layers" else [value]
        elif type(value) is int:
            values[key] = [value]
    if values.get("freeze") is True:
        values.setdefault("scale", 0.0)
    elif "depth_decay" in values:
        values.setdefault("scale", 1.0)
    if "scale" not in values:
        raise UserError(f"{section}.scale: missing; give a factor of the learning rate, or freeze: true")
    return from_dict(LearningRateRule, values, section=section)


def _range(entry: int | str, where: str) -> tuple[int, int]:
    """The first and the last layer of an entry of ``layers``."""
    if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", str(entry)):
        raise UserError(
            f"{where}.layers: {quote(entry)} is not valid; give {', '.join(LAYER_WORDS)}, a layer, a range "
            "such as 6-11, or a list of them"
        )
    first, _, last = str(entry).partition("-")
    return int(first), int(last or first)


def _join_entries(entries: Iterable[int | str]) -> str:
    return ", ".join(str(entry) for entry in entries)
