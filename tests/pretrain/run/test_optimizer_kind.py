"""Which optimizer a resumed run may have: that of its checkpoint, or another one that starts from nothing."""

import dataclasses
import itertools

import pytest

from model.errors import UserError
from pretrain.checkpoint.state import TrainingState
from pretrain.config.command_line import parse_command_line
from pretrain.run.resume import check_resume, resets_optimizer

KINDS = ("adamw", "muon")


def with_optimizer(kind, **changes):
    run = parse_command_line(["--config", "micro", "--model", "prism-nano", "--optimizer.kind", kind]).run
    return dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, **changes))


@pytest.mark.parametrize(("before", "now"), list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize("imported", [False, True])
def test_another_kind_is_rejected_unless_its_state_is_given_up(before, now, imported):
    """An imported model has no optimizer state, so that any kind may train it."""
    earlier = with_optimizer(before)
    model = earlier.build_model_config()
    asked = {} if imported else earlier.to_dict()
    saved = TrainingState(step=3, model=model.to_json(), run=asked)
    for reset in (False, True):
        run = with_optimizer(now, reset=reset)
        state = TrainingState(model=model.to_json(), run=run.to_dict())
        other = before != now and not imported
        if other and not reset:
            message = rf"^optimizer\.kind: .* trained with {before}, .*--optimizer\.kind {before}"
            with pytest.raises(UserError, match=message):
                resets_optimizer(saved, run)
            with pytest.raises(UserError, match=message):
                check_resume(saved, state, run, model)
        else:
            assert resets_optimizer(saved, run) is other
            notes = check_resume(saved, state, run, model)
            assert any("the optimizer state is reset" in note for note in notes) is other
