"""Measures a network while it reads fixed windows: attention, residual writes, features.

The network runs its ordinary forward pass, in evaluation mode and without gradients; hooks read the
activations. So it works for any DeepSpeed engine or plain module that holds the network: any ZeRO stage, any
tensor- and context-parallel degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.attention import Attention, share
from model.collectives import gather_sequence
from model.config import ModelConfig
from model.context import all_positions, own_positions
from model.transformer import Block, Transformer
from pretrain.data.held_out import HeldOutBatches
from pretrain.diagnostics.attention import HEAD_MEASURES, head_sums
from pretrain.runtime.world import World

LAYER_MEASURES = ("attention_write", "ffn_write", "path_energy")
"""Measures per layer; ``ProbeResult`` defines them."""


@dataclass(frozen=True)
class ProbeResult:
    """The measures of one pass over the windows, the same on every rank."""

    heads: list[Tensor]
    """By layer: fp64 [h_l, 4], the means of HEAD_MEASURES over the counted queries of all windows."""
    layers: Tensor
    """fp64 [L, 3], LAYER_MEASURES; those of a part that a layer lacks mean nothing. With X the stream that
    enters a layer (in attention_write what the layer reads of it), a what its attention adds and f what its
    feed-forward network adds, ‖·‖² summed over all positions: attention_write ‖a‖²/‖X‖², ffn_write ‖f‖²/‖X +
    a‖², path_energy (sum of ‖a‖² + ‖f‖² of the layers below)/‖X‖². The last is how we read R_P/‖X‖²_F of
    arXiv 2605.10504, which does not define it: energy of the residual writes on the path into the layer."""
    features: dict[int, Tensor]
    """By requested layer: fp32 [windows, positions, d] on the CPU, see ``normalize``."""
    gates: list[Tensor]
    """By layer: fp64 [h_l], the mean of each head's gates over the queries that HEAD_MEASURES count; empty
    where there are none."""
    absent: frozenset[tuple[int, str]] = frozenset()
    """Layers, and the measures of a part that they lack."""

    def row(self, before: Mapping[int, Tensor]) -> dict[str, Any]:
        """Return the values by their metrics keys: by layer (mean over its heads), and lists by layer and
        head.

        Args:
            before: the features of the measurement before, from which the drift is counted where there are
                some of the same windows and positions.
        """
        row: dict[str, Any] = {}
        for index, measure in enumerate(HEAD_MEASURES):
            for layer, heads in enumerate(self.heads):
                if not len(heads):
                    continue
                row[f"diagnostics/{measure}/layer_{layer}"] = heads[:, index].mean().item()
        for layer, gates in enumerate(self.gates):
            if len(gates):
                row[f"diagnostics/attention_gate/layer_{layer}"] = gates.mean().item()
        for measure, by_layer in zip(LAYER_MEASURES, self.layers.T.tolist(), strict=True):
            row |= {
                f"diagnostics/{measure}/layer_{layer}": value
                for layer, value in enumerate(by_layer)
                if (layer, measure) not in self.absent
            }
        for index, measure in enumerate(HEAD_MEASURES):
            row[f"diagnostics/{measure}/heads"] = [heads[:, index].tolist() for heads in self.heads]
        if any(len(gates) for gates in self.gates):
            row["diagnostics/attention_gate/heads"] = [gates.tolist() for gates in self.gates]
        for layer, features in self.features.items():
            if layer in before and before[layer].shape == features.shape:
                row[f"diagnostics/feature_drift/layer_{layer}"] = feature_drift(features, before[layer])
        return row


class ForwardProbe:
    """Measures a network while it reads the same windows each time.

    Args:
        config: the model.
        windows: token ids [n, T+1].
        micro_batch: sequences per rank and forward pass; with tensor parallelism one that its ranks can
            split.
        world: the ranks that share the work.
        positions: how many positions of each window are kept as features, spread evenly.
    """

    def __init__(
        self, config: ModelConfig, windows: np.ndarray, micro_batch: int, world: World, positions: int = 64
    ) -> None:
        self.config, self.world = config, world
        self.batches = HeldOutBatches(windows, micro_batch, world)
        length = self.batches.length
        count = min(positions, length)
        self.positions = torch.tensor([(index + 1) * length // count - 1 for index in range(count)])

    @torch.no_grad()
    def run(self, engine: Any, features: Sequence[int] = (), attention: bool = True) -> ProbeResult:
        """Run the windows through the network. Collective; weights and training numbers do not change.

        As in validation, every rank makes the same number of passes: a rank that has run out of windows
        repeats the first and does not count it.

        Args:
            engine: a DeepSpeed engine, or the network itself.
            features: layers whose output is returned.
            attention: whether to measure attention and residual writes, or the features alone.
        """
        with prepare_measurement(engine) as (network, hooks):
            recorder = _Recorder(self, network, features)
            recorder.register(hooks, attention)
            for batch in self.batches:
                recorder.rows, recorder.present = batch.rows, batch.present
                given = [batch.inputs, batch.labels]  # with labels no logits are made of the whole vocabulary
                if self.config.classes is not None:  # the windows hold examples one after the other
                    given = [batch.inputs]
                engine(*(tensor.to(self.world.device) for tensor in given))
        return recorder.result()


class _Recorder:
    """Sums up the measures of a network's passes, which its hooks hand to it."""

    rows: Tensor
    """Of the windows that the pass under way reads."""
    present: Tensor
    """Which of them count, bool."""

    def __init__(self, probe: ForwardProbe, network: Transformer, features: Sequence[int]) -> None:
        config, device = probe.config, probe.world.device
        self.probe, self.network = probe, network
        self.head_sums = [torch.zeros(h, 5, dtype=torch.float64, device=device) for h in config.heads]
        self.gate_sums = [torch.zeros(h, dtype=torch.float64, device=device) for h in config.heads]
        # ‖X‖² of the stream, ‖a‖², ‖X + a‖², ‖f‖² and ‖X‖² of what attention reads, of each layer
        self.energies = torch.zeros(config.num_layers, 5, dtype=torch.float64, device=device)
        shape = (probe.batches.count, len(probe.positions), config.stream_width)
        self.features = {layer: torch.zeros(shape, device=device) for layer in features}
        self.seen: dict[str, Tensor] = {}
        """The projections of the attention under way."""

    def register(self, hooks: ExitStack, attention: bool) -> None:
        """Register the hooks of every layer, which end with *hooks*."""

        def on_enter(module: nn.Module, record: Callable[[Tensor], None]) -> None:
            hooks.callback(module.register_forward_pre_hook(lambda _, given: record(given[0])).remove)

        def on_leave(module: nn.Module, record: Callable[[Tensor], None]) -> None:
            hooks.callback(module.register_forward_hook(lambda _, given, output: record(output)).remove)

        for layer, block in enumerate(self.network.layers):
            assert isinstance(block, Block)
            if layer in self.features:
                on_leave(block, partial(self._record_features, layer))
            if not attention:
                continue
            on_enter(block, partial(self._add_energy, layer, 0))
            if (attending := block.attention) and block.attention_norm is not None:
                on_enter(block.attention_norm, partial(self._add_energy, layer, 4))
                on_leave(attending.q, partial(self.seen.__setitem__, "q"))
                on_leave(attending.k, partial(self.seen.__setitem__, "k"))
                on_leave(attending, partial(self._add_energy, layer, 1))
                hooks.callback(attending.register_forward_hook(partial(self._add_head_sums, layer)).remove)
                if attending.head_gate is not None:
                    on_leave(attending.head_gate, partial(self._add_gates, layer))
                if attending.gate is not None:
                    on_leave(attending.gate, partial(self._add_gate_logits, layer))
            if block.ffn is not None and block.ffn_norm is not None:
                on_enter(block.ffn_norm, partial(self._add_energy, layer, 2))
                on_leave(block.ffn, partial(self._add_energy, layer, 3))

    def _add_energy(self, layer: int, which: int, hidden: Tensor) -> None:
        """Add ‖hidden‖² of the sequences that count; hidden [B, T, d], with sequence or context
        parallelism a part of T."""
        norms = torch.linalg.vector_norm(hidden, dim=(1, 2), dtype=torch.float64)
        self.energies[layer, which] += (norms.square() * self.present.to(norms.device)).sum()

    def _add_head_sums(
        self, layer: int, attention: Attention, given: tuple[Any, ...], output: Tensor
    ) -> None:
        """Add the sums of the heads, with the positions and masks that the network gives the layer."""
        query, key = self.seen.pop("q"), self.seen.pop("k")  # [B, T, own columns]
        heads, _ = attention.whole_heads(query, key, key, *given[1:])
        exchange, first = attention.exchange, 0
        if exchange is not None:
            first = self.network.grid.tensor_rank // exchange.ranks * attention.heads
        if attention.context is not None:
            heads, _ = share(heads, attention.context)
            first += attention.context.head_index * heads.query.shape[2]
        count = heads.query.shape[2]  # of the group's heads, those that this context rank has
        present = self.present[heads.sequences].tolist()
        sums = head_sums(heads, scale=attention.scale, present=present, window=attention.window)
        self.head_sums[layer][first : first + count] += sums

    def _add_gates(self, layer: int, gates: Tensor) -> None:
        """Add the gates [B, T, own columns] of the sequences and queries that count, a part 1 / d_h of its
        head's each."""
        config, grid = self.probe.config, self.network.grid
        half: Any = slice(gates.shape[1] // 2, None)
        if grid.context_parallel > 1:
            length = gates.shape[1] * grid.context_parallel
            half = own_positions(torch.arange(length, device=gates.device), grid, 0) >= length // 2
        counted = gates[self.present.to(gates.device)][:, half].double().sum((0, 1))
        head_dim = config.layer_head_dim(layer)
        columns = torch.arange(len(counted), device=gates.device) + grid.tensor_rank * len(counted)
        self.gate_sums[layer].index_add_(0, columns // head_dim, counted / head_dim)

    def _add_gate_logits(self, layer: int, logits: Tensor) -> None:
        self._add_gates(layer, logits.sigmoid())

    def _record_features(self, layer: int, hidden: Tensor) -> None:
        grid = self.network.grid
        if grid.sequence_parallel:  # each rank has a part of T
            hidden = gather_sequence(hidden, grid.tensor_group)
        if grid.context_parallel > 1:
            hidden = all_positions(hidden, grid)
        sample = normalize(hidden[:, self.probe.positions.to(hidden.device)], self.probe.config)
        present = self.present.to(hidden.device)
        self.features[layer][self.rows[self.present].to(hidden.device)] = sample[present].float()

    def result(self) -> ProbeResult:
        """Sum over the ranks, and return the measures."""
        world, grid = self.probe.world, self.network.grid
        head_sums = torch.cat([torch.cat(self.head_sums), torch.cat(self.gate_sums)[:, None]], dim=1)
        if world.size > 1:
            if grid.tensor_parallel > 1 and not grid.sequence_parallel and grid.tensor_rank:
                # Hidden states are whole on every rank of a tensor group: count them once.
                self.energies.zero_()
            dist.all_reduce(self.energies)
            dist.all_reduce(head_sums)
        features = {layer: world.sum(layer_features).cpu() for layer, layer_features in self.features.items()}
        config = self.probe.config
        *means, gates = (head_sums / head_sums[:, 4:5]).cpu().split((4, 1, 1), dim=1)
        heads = list(means[0].split(list(config.heads)))
        gated = [len(each) * (config.attention_gate != "none") for each in heads]
        found = [part.flatten()[:count] for part, count in zip(gates.split(config.heads), gated, strict=True)]
        on_enter, attention, middle, ffn, read = self.energies.cpu().unbind(1)
        path = torch.cumsum(attention + ffn, 0) - (attention + ffn)
        layers = torch.stack([attention / read, ffn / middle, path / on_enter], dim=1)
        absent = {(layer, "attention_write") for layer, count in enumerate(config.heads) if not count}
        absent |= {(layer, "ffn_write") for layer, width in enumerate(config.ffn_widths) if not width}
        return ProbeResult(heads, layers, features, found, frozenset(absent))


@contextmanager
def prepare_measurement(engine: Any) -> Iterator[tuple[Transformer, ExitStack]]:
    """Prepare a pass in which torch's hooks read activations: the network in evaluation mode, and a stack of
    callbacks that remove the hooks when the block ends. Call the engine, on all ranks; gradients are not
    turned off.

    Compiled blocks run uncompiled: they ignore hooks added later, and must not be recompiled for them.

    .. code-block:: python

        with prepare_measurement(engine) as (network, ending), torch.no_grad():
            handle = network.layers[0].register_forward_hook(lambda module, given, output: see(output))
            ending.callback(handle.remove)
            engine(tokens, labels)

    Args:
        engine: DeepSpeed's engine, or the network itself.
    """
    network: Transformer = getattr(engine, "module", engine)
    with ExitStack() as ending:
        ending.callback(engine.train, network.training)
        engine.eval()
        if any(getattr(block, "_compiled_call_impl", None) is not None for block in network.layers):
            ending.enter_context(torch.compiler.set_stance("force_eager"))
        yield network, ending


def normalize(hidden: Tensor, config: ModelConfig) -> Tensor:
    """Normalize hidden states [..., d] as the norms of the layers above do, over the whole stream also where
    those have block widths: rms 1 (centred first for a layernorm)."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if config.norm == "layernorm":
        wide = wide - wide.mean(-1, keepdim=True)
    return wide / wide.square().mean(-1, keepdim=True).clamp_min(1e-24).sqrt()


def feature_drift(features: Tensor, before: Tensor) -> float:
    """‖F - F'‖_F / ‖F'‖_F, normalized features of the same tokens at two times: 0 unmoved, √2 unrelated, 2
    opposite."""
    difference = torch.linalg.vector_norm(features - before, dtype=torch.float64)
    return (difference / torch.linalg.vector_norm(before, dtype=torch.float64)).item()


def lower_layers(num_layers: int) -> list[int]:
    """The lower half: layers l with 2 l < L, l from 0."""
    return [layer for layer in range(num_layers) if 2 * layer < num_layers]
