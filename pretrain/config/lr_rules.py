"""Learning-rate rules: which parameters leave the base schedule, for how long, and by how much.

    lr_rules:
      - {name: upper_qk, parameters: [q, k], layers: upper_half, scale: 0.25, hold: 0.04, ramp: 0.01}

lr(group, step) = base schedule(step) x multiplier(group, step). The first rule that matches a parameter is its rule;
parameters that none matches follow the base schedule. pretrain/optim/schedule.py says what the multiplier is at each
step, pretrain/optim/groups.py what the optimizer's groups are. Nothing heavy is imported here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from model.errors import UserError, closest, shown
from pretrain.utils.parsing import is_finite

if TYPE_CHECKING:
    from model.parameters import ParameterRole

PARTS = ("q", "k", "v", "o", "ffn", "norm", "embedding", "output")
LAYER_WORDS = ("all", "upper_half", "lower_half")
RELEASES = ("hold", "maturity")
BASE = "base"
LATEST = 0.12

# The intervention of arXiv 2605.10504, by name: `lr_rules: [upper_qk]`. A quarter of the rate for 4 % of the steps,
# then back over 1 %. The second ends it when the lower half has settled (pretrain/diagnostics/maturity.py), at 12 % at
# the latest.
NAMED_RULES: dict[str, dict[str, Any]] = {
    "upper_qk": {"parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "hold": 0.04, "ramp": 0.01},
    "upper_qk_maturity": {
        "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "release": "maturity", "latest": 0.12,
        "ramp": 0.01,
    },
}  # fmt: skip


@dataclass(frozen=True)
class LearningRateRule:
    """One rule. Lengths below 1 are fractions of the run, others are steps.

    ``upper_qk`` above is the rule of arXiv 2605.10504. That paper leaves open what becomes of the biases of q and k
    (here: nothing, see ``biases``) and of their weight decay (here: it slows down too, see ``decay_with_lr``).
    """

    name: str
    """Names the optimizer groups, the logs' ``lr/NAME/decay`` and what checkpoints restore; letters, digits, _ . -"""
    parameters: tuple[str, ...]
    """q, k, v, o, ffn, norm, embedding (tokens and positions), output (an untied head), or patterns of full parameter
    names such as ``layers.*.attention.q.weight``. A part means its matrices; norm its weights and biases."""
    layers: tuple[int | str, ...] = ("all",)
    """all; upper_half (2 l >= L, l from 0) or lower_half; layers and ranges with both ends: ``6-11``, ``[0, 2, 6-11]``.
    Only all includes what lies outside the layers: embeddings, the final norm, the output head."""
    scale: float = 1.0
    """Factor of the base learning rate while the rule holds."""
    hold: float | None = None
    """How long it holds; to the end of the run when not given. With ``release: maturity`` the shortest time."""
    ramp: float = 0.0
    """Length over which the factor then returns to 1, in equal steps; 0 is at once."""
    release: Literal["hold", "maturity"] = "hold"
    """hold: after the hold. maturity: when the lower half of the layers has settled (diagnostics/maturity.py)."""
    latest: float | None = None
    """With ``release: maturity``: when the release is forced (12 % of the run; arXiv 2605.10504)."""
    depth_decay: float = 1.0
    """Geometric decay by depth: the factor is scale x depth_decay^i in the i-th layer above the rule's lowest one."""
    freeze: bool = False
    """Do not train these parameters while the rule holds: a factor of 0, no update and no decay."""
    decay_with_lr: bool = True
    """true: AdamW's way, weight decay is scaled by the group's learning rate, so that a slowed parameter is decayed
    less. false: by the base learning rate, as if there were no rule. The paper does not say which it used."""
    biases: bool = False
    """Whether a part's biases (of the linear layers) follow the rule too; the paper names the projections W_Q, W_K."""

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
            first, last = _range(entry)
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
    """Read the rules of a recipe: mappings with the fields of LearningRateRule, or names in NAMED_RULES.

    Raises:
        UserError: an unknown key or name, a value that is not valid, two rules of one name.
    """
    rules = [_parse_rule(entry, index) for index, entry in enumerate(entries)]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"lr_rules: two rules are called {shown(name)}; give each its own name")
    return tuple(rules)


def match_rules(
    rules: Sequence[LearningRateRule], roles: Mapping[str, ParameterRole], num_layers: int
) -> dict[str, LearningRateRule | None]:
    """Assign every parameter its rule, or None where the base schedule applies.

    Raises:
        UserError: a rule matches no parameter of the model, or only some that earlier rules have taken; a layer is
            outside the model; depth_decay is given for parameters outside the layers.
    """
    rule_of: dict[str, LearningRateRule | None] = dict.fromkeys(roles)
    for rule in rules:
        layers = rule.layer_set(num_layers)
        matching = [name for name, role in roles.items() if rule.matches(name, role, layers)]
        if not matching:
            raise UserError(_matches_nothing(rule, roles, num_layers))
        unassigned = [name for name in matching if rule_of[name] is None]
        if not unassigned:
            takers = list(dict.fromkeys(taken.name for name in matching if (taken := rule_of[name])))
            raise UserError(
                f"lr_rules.{rule.name}: every parameter it matches is taken by {' and '.join(takers)} before it "
                "(the first match wins); move it before them, or remove it"
            )
        outside = [name for name in unassigned if roles[name].layer is None]
        if rule.depth_decay != 1 and outside:
            raise UserError(
                f"lr_rules.{rule.name}.depth_decay: {outside[0]} lies outside the layers and has no depth; "
                "name layers, or other parameters"
            )
        rule_of.update(dict.fromkeys(unassigned, rule))
    return rule_of


def _matches_nothing(rule: LearningRateRule, roles: Mapping[str, ParameterRole], num_layers: int) -> str:
    anywhere = any(rule.matches(name, role, None) for name, role in roles.items())
    if anywhere:
        why = f"layers {_shown(rule.layers)} have no such parameter; layers: all matches some"
    else:
        parts = sorted({role.part for role in roles.values()})
        why = f"the model has {', '.join(parts)}; its first parameter is called {next(iter(roles))}"
    what = f"parameters {_shown(rule.parameters)} in layers {_shown(rule.layers)} of {num_layers}"
    return f"lr_rules.{rule.name}: {what} match nothing; {why}"


# ---------------------------------------------------------------------- reading


def _parse_rule(entry: Any, index: int) -> LearningRateRule:
    where = f"lr_rules[{index}]"
    if isinstance(entry, str):
        if entry not in NAMED_RULES:
            hint = closest(entry, NAMED_RULES) or f"; known are {', '.join(NAMED_RULES)}"
            raise UserError(f"{where}: there is no rule called {shown(entry)}{hint}, or write a mapping")
        entry = {"name": entry, **NAMED_RULES[entry]}
    if not isinstance(entry, Mapping):
        raise UserError(
            f"{where}: {shown(entry)} is not a rule; write a mapping with name, parameters, layers and scale"
        )
    known = [field.name for field in dataclasses.fields(LearningRateRule)]
    for key in entry:
        if key not in known:
            hint = closest(shown(key, plain=True), known) or f"; valid keys are {', '.join(known)}"
            raise UserError(f"{where}.{shown(key, plain=True)}: unknown key{hint}")
    name = entry.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name == BASE:
        raise UserError(
            f"{where}.name: {shown(name)} is not valid; give a name of letters, digits, _ . and -, other than {BASE!r}"
        )
    return _checked(name, dict(entry))


def _checked(name: str, values: dict[str, Any]) -> LearningRateRule:
    where = f"lr_rules.{name}"
    for flag in ("freeze", "decay_with_lr", "biases"):
        if type(values.get(flag, False)) is not bool:
            raise UserError(f"{where}.{flag}: {shown(values[flag])} is not valid; give true or false")
    values["parameters"] = _parameters(where, values.get("parameters"))
    values["layers"] = _layers(where, values.get("layers", "all"))
    if values.get("release", "hold") not in list(RELEASES):
        raise UserError(
            f"{where}.release: {shown(values['release'])} is not valid; give one of {', '.join(RELEASES)}"
        )
    for length in ("hold", "ramp", "latest", "depth_decay"):
        if values.get(length) is not None:
            values[length] = _number(f"{where}.{length}", values[length])
        elif length in ("ramp", "depth_decay"):
            values.pop(length, None)
    freeze = values.get("freeze", False)
    values["scale"] = _scale(where, values)
    if values.get("depth_decay", 1.0) == 0:
        raise UserError(f"{where}.depth_decay: 0 is not valid; give a positive factor per layer")
    if freeze and values.get("depth_decay", 1.0) != 1:
        raise UserError(f"{where}.depth_decay: it has no effect beside freeze: true; leave one of them out")
    if freeze and not values.get("decay_with_lr", True):
        raise UserError(
            f"{where}.decay_with_lr: false contradicts freeze: true: with a learning rate of 0 AdamW cannot decay"
        )
    maturity = values.get("release") == "maturity"
    if maturity and values.get("latest") is None:
        values["latest"] = LATEST
    if not maturity and values.get("latest") is not None:
        raise UserError(f"{where}.latest: it is for release: maturity; leave it out")
    if not maturity and values.get("hold") is None and values.get("ramp"):
        raise UserError(f"{where}.ramp: without a hold the rule never ends; give hold, or leave ramp out")
    return LearningRateRule(**values)


def _parameters(where: str, value: Any) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(e, str) for e in entries):
        raise UserError(
            f"{where}.parameters: {shown(value)} is not valid; give a list of {', '.join(PARTS)} or name patterns"
        )
    for entry in entries:
        if entry not in PARTS and not set(entry) & set("*?[."):
            hint = closest(entry, PARTS) or f"; valid are {', '.join(PARTS)}"
            raise UserError(
                f"{where}.parameters: {shown(entry)} is unknown{hint}, or a pattern such as *.attention.q.*"
            )
    return tuple(entries)


def _layers(where: str, value: Any) -> tuple[int | str, ...]:
    entries = value.split(",") if isinstance(value, str) else value
    entries = [entries] if type(entries) is int else entries
    valid = f"give {', '.join(LAYER_WORDS)}, a layer, a range such as 6-11, or a list of them"
    if not isinstance(entries, list | tuple) or not entries:
        raise UserError(f"{where}.layers: {shown(value)} is not valid; {valid}")
    layers: list[int | str] = []
    for entry in entries:
        entry = entry.strip() if isinstance(entry, str) else entry
        if entry in LAYER_WORDS and len(entries) == 1:
            return (entry,)
        is_range = isinstance(entry, str) and re.fullmatch(r"\d{1,9}(-\d{1,9})?", entry, re.ASCII) is not None
        if not is_range and (type(entry) is not int or not 0 <= entry < 10**9):
            raise UserError(f"{where}.layers: {shown(entry)} is not valid; {valid}")
        first, last = _range(entry)
        if last < first:
            raise UserError(f"{where}.layers: {shown(entry)} ends before it begins; write {last}-{first}")
        layers.append(entry)
    return tuple(layers)


def _range(entry: int | str) -> tuple[int, int]:
    first, _, last = str(entry).partition("-")
    return int(first), int(last or first)


def _scale(where: str, values: dict[str, Any]) -> float:
    scale, freeze = values.get("scale"), values.get("freeze", False)
    if scale is None:
        if freeze:
            return 0.0
        if values.get("depth_decay", 1.0) != 1:
            return 1.0
        raise UserError(f"{where}.scale: missing; give a factor of the learning rate, or freeze: true")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not is_finite(scale):
        raise UserError(f"{where}.scale: {shown(scale)} is not valid; give a positive number")
    if freeze and scale != 0:
        raise UserError(f"{where}.scale: {scale} contradicts freeze: true; leave one of them out")
    if not freeze and scale <= 0:
        hint = "freeze: true stops these parameters" if scale == 0 else "learning rates are positive"
        raise UserError(f"{where}.scale: {scale} is not valid; give a positive number ({hint})")
    return float(scale)


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value) or value < 0:
        raise UserError(f"{where}: {shown(value)} is not valid; give zero or a positive number")
    return float(value)


def _shown(entries: Iterable[int | str]) -> str:
    return ", ".join(str(entry) for entry in entries)
