"""Model and optimizer as named tensors: what a checkpoint must fit, and what it leaves alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.checkpoint_toys import Toy, assert_same, checkpointer, fresh, state, train_step, trained
from trainer.checkpoint import load_weights, open_checkpoint


def test_state_that_the_checkpoint_does_not_have_is_dropped(tmp_path: Path) -> None:
    untouched, optimizer = trained(steps=0)
    saver = checkpointer(tmp_path)
    saver.save(0, untouched, optimizer, {})
    assert not optimizer.state, "saving must not step the optimizer"
    stepped, stepped_optimizer = trained(steps=3)
    saver.load(tmp_path, stepped, stepped_optimizer)
    assert_same(state(stepped, stepped_optimizer), state(untouched, optimizer))


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path)
    saver.save(1, model, optimizer, {})

    wider = Toy(hidden=6)
    with pytest.raises(
        ValueError, match=r"of another shape: .*model.first.weight \(checkpoint \(5, 3\), here \(6, 3\)\)"
    ):
        saver.load(tmp_path, wider, torch.optim.AdamW(wider.parameters()))
    more = Toy()
    more.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 missing in the checkpoint: model.extra.weight, model.extra.bias"):
        saver.load_weights(tmp_path, more)
    less = Toy()
    del less.unused
    with pytest.raises(ValueError, match=r"1 unexpected in the checkpoint: model.unused"):
        load_weights(tmp_path, less)
    double = Toy().double()
    with pytest.raises(ValueError, match=r"of another dtype: model.unused"):
        saver.load(tmp_path, double, torch.optim.AdamW(double.parameters()))
    sgd = torch.optim.SGD(Toy().parameters())
    with pytest.raises(ValueError, match=r"optimizer AdamW, this run uses SGD.*init_from"):
        saver.load(tmp_path, Toy(), sgd)
    with pytest.raises(ValueError, match="no memory yet"), torch.device("meta"):
        load_weights(tmp_path, Toy())


def test_weights_alone_cast_and_leave_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpointer(tmp_path / "run" / "checkpoints").save(2, model, optimizer, {"config": {"model": "toy"}})
    stored = open_checkpoint(tmp_path / "run")
    assert (stored.step, stored.world_size, stored.extra) == (2, 1, {"config": {"model": "toy"}})
    target = fresh()[0].bfloat16()
    load_weights(tmp_path / "run", target)
    for name, value in model.state_dict().items():
        assert torch.equal(target.state_dict()[name], value.bfloat16()), name


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer = trained()
    model.first = checkpoint_wrapper(model.first)  # type: ignore[assignment]
    model.second = torch.compile(model.second, backend="eager")  # type: ignore[assignment]
    checkpointer(tmp_path).save(2, model, optimizer, {})
    plain, plain_optimizer = fresh()
    checkpointer(tmp_path).load(tmp_path, plain, plain_optimizer)
    assert torch.equal(plain.first.weight, model.first.weight)
    assert torch.equal(
        plain_optimizer.state[plain.first.weight]["exp_avg"], optimizer.state[model.first.weight]["exp_avg"]
    )


def test_tied_parameters(tmp_path: Path) -> None:
    def tied() -> tuple[Toy, torch.optim.Adam]:
        model = Toy()
        model.head = nn.Linear(3, 5)
        model.head.weight = model.first.weight
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = tied()
    train_step(model, optimizer)
    checkpointer(tmp_path).save(1, model, optimizer, {})
    new_model, new_optimizer = tied()
    checkpointer(tmp_path).load(tmp_path, new_model, new_optimizer)
    assert_same(state(new_model, new_optimizer), state(model, optimizer))
    assert new_model.head.weight is new_model.first.weight


def test_momentum_and_plain_sgd(tmp_path: Path) -> None:
    for momentum in (0.0, 0.9):
        folder = tmp_path / str(momentum)
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        train_step(model, optimizer)
        checkpointer(folder).save(1, model, optimizer, {})
        new_model, _ = fresh()
        new_optimizer = torch.optim.SGD(new_model.parameters(), lr=0.1, momentum=momentum)
        checkpointer(folder).load(folder, new_model, new_optimizer)
        torch.manual_seed(3)
        train_step(model, optimizer)
        torch.manual_seed(3)
        train_step(new_model, new_optimizer)
        for name, value in model.state_dict().items():
            assert torch.equal(new_model.state_dict()[name], value), (momentum, name)


def test_state_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver = checkpointer(tmp_path)
    with pytest.raises(ValueError, match="JSON-able"):
        saver.save(1, model, optimizer, {"loss": torch.ones(1)})
    optimizer.state[model.first.weight]["odd"] = "text"
    with pytest.raises(ValueError, match=r"'odd' of first.weight"):
        saver.save(1, model, optimizer, {})
    with pytest.raises(ValueError, match=r"not the model's"):
        saver.save(1, model, torch.optim.SGD(Toy().parameters()), {})
    assert not list(tmp_path.iterdir())
