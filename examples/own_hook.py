"""Your own code between training steps: a measurement whose values are logged with those of the run.

    python examples/own_hook.py

For ZeRO stages 1 and 2 without tensor parallelism: elsewhere a rank holds a part of each parameter.
examples/best_loss.py is a hook that remembers something from one session to the next.
"""

import math

from pretrain import Hook, HookResult, Session, read_metrics, recipe, train


class WeightNorms(Hook):
    """The norm of every layer's query projection at each tenth step, in metrics.jsonl and on the console."""

    name = "weight_norms"

    def __init__(self, session: Session) -> None:
        self.layers = session.model_config.num_layers

    def is_due(self, step: int) -> bool:
        return step % 10 == 0

    def run(self, engine, state, row) -> HookResult:
        squares = [0.0] * self.layers
        for name, weight in engine.module.named_parameters():
            if name.endswith("attention.q.weight"):
                squares[int(name.split(".")[1])] += weight.float().square().sum().item()
        norms = [math.sqrt(total) for total in squares]
        values = {f"weight_norm/layer_{layer}": norm for layer, norm in enumerate(norms)}
        return HookResult(values, [f"norms    {' '.join(f'{norm:.2f}' for norm in norms)}"])


run = recipe("micro", name="hook", steps=50, heads="2,4,8,16")
trained = train(run, hooks=[WeightNorms])
last = read_metrics(trained.run_folder)[-1]
print({name: round(value, 2) for name, value in last.items() if name.startswith("weight_norm")})
