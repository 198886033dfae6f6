"""Activation checkpointing across processes: same gradients in every mode, and not one exchange more."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from comms import all_to_all
from comms.config import CommsConfig
from moe.experts import GroupedExperts
from parallel.config import ParallelConfig
from tests.distributed.harness import run_workers
from tests.distributed.tiny_models import MODELS, num_moe_layers
from trainer.parity import Trace, compare, trace_layout

MODES = ["none", "selective", "full"]


def count_exchanges(
    name: str, mode: str, ep: int = 2, ranks_per_node: int | None = None
) -> tuple[dict[str, int], Trace | None]:
    """Collectives of two steps by kind, counted below the operators, where the network begins; and the trace."""
    calls: Counter[str] = Counter()
    exchange, all_to_all_single, all_reduce = all_to_all._exchange, dist.all_to_all_single, dist.all_reduce

    def counted_exchange(*args: Any) -> Tensor:
        calls["rows"] += 1
        return exchange(*args)

    def counted_all_to_all(*args: Any, **kwargs: Any) -> Any:
        calls["all_to_all"] += 1
        return all_to_all_single(*args, **kwargs)

    def counted_all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls["all_reduce"] += 1
        return all_reduce(*args, **kwargs)

    with (
        patch.object(all_to_all, "_exchange", counted_exchange),
        patch.object(dist, "all_to_all_single", counted_all_to_all),
        patch.object(dist, "all_reduce", counted_all_reduce),
    ):
        parallel = ParallelConfig(ep=ep, activation_checkpoint=mode)
        trace = trace_layout(MODELS[name], parallel, steps=2, comms=CommsConfig(ranks_per_node=ranks_per_node))
    return dict(calls), trace if dist.get_rank() == 0 else None


@pytest.mark.parametrize("name", MODELS)
def test_no_exchange_is_repeated_and_nothing_changes(name: str) -> None:
    results = {mode: run_workers(count_exchanges, 2, name, mode) for mode in MODES}
    num_layers = num_moe_layers(MODELS[name])
    for (calls, _), *_ in results.values():
        # Per layer and step: dispatch, combine and the mirror of each. Beside them one exchange of counts.
        assert calls["rows"] == 2 * 4 * num_layers, calls
        assert calls["all_to_all"] == 2 * 5 * num_layers, calls
        assert calls == results["none"][0][0]
    # A recomputation repeats the forward exactly, so not one bit may differ.
    reference = results["none"][0][1]
    for mode in ("selective", "full"):
        assert not compare(results[mode][0][1], reference, 0.0)


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_no_exchange_of_two_levels_is_repeated(name: str) -> None:
    """Each way is two exchanges, and a plan one of items and two of counts."""
    results = {mode: run_workers(count_exchanges, 4, name, mode, 4, 2) for mode in MODES}
    num_layers = num_moe_layers(MODELS[name])
    for (calls, _), *_ in results.values():
        assert calls["rows"] == 2 * (1 + 2 * 4) * num_layers, calls
        assert calls["all_to_all"] == 2 * (2 + 1 + 2 * 4) * num_layers, calls
    reference = results["none"][0][1]
    for mode in ("selective", "full"):
        assert not compare(results[mode][0][1], reference, 0.0)


def forwards_of_experts(name: str, mode: str) -> tuple[int, int]:
    """How often the experts' forward began and how often it ended, recomputations included."""
    began, ended = [], []
    original = GroupedExperts.__init__

    def init(self: GroupedExperts, *args: Any) -> None:
        original(self, *args)
        self.register_forward_pre_hook(lambda *_: began.append(1))
        self.register_forward_hook(lambda *_: ended.append(1))

    with patch.object(GroupedExperts, "__init__", init):
        trace_layout(MODELS[name], ParallelConfig(ep=2, activation_checkpoint=mode), steps=1)
    return len(began), len(ended)


@pytest.mark.parametrize("name", MODELS)
def test_a_recomputation_never_ends_inside_the_experts(name: str) -> None:
    """FSDP wraps them: were its hook after forward cut off, its state would be that of an unfinished forward."""
    num_layers = num_moe_layers(MODELS[name])
    for mode in ("selective", "full"):
        assert run_workers(forwards_of_experts, 2, name, mode) == [(2 * num_layers, 2 * num_layers)] * 2


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_case_22_recomputation_counts_tokens_once(mode: str) -> None:
    """Layer by layer the counts of 4 processes add up to (real tokens) x K, as they do in one process."""
    model = MODELS["deepseek"]
    parallel = ParallelConfig(ep=2, activation_checkpoint=mode)
    ours = run_workers(trace_on_rank_0, 4, model, parallel)[0]
    reference = run_workers(trace_on_rank_0, 1, model, ParallelConfig())[0]
    assert not compare(ours, reference, 1e-10)
    for step, counts in enumerate(ours.counts):
        assert int(counts.sum()) == _real_tokens(step) * model.moe.top_k


def _real_tokens(step: int) -> int:
    from trainer.config import Config, TrainConfig
    from trainer.parity import synthetic_sample

    config = Config(train=TrainConfig(seq_len=16), model=MODELS["deepseek"])
    documents = [synthetic_sample(config, 8 * step + index)[3] for index in range(8)]
    return sum(int((document >= 0).sum()) for document in documents)


def trace_on_rank_0(model: Any, parallel: ParallelConfig) -> Trace | None:
    trace = trace_layout(model, parallel)
    return trace if dist.get_rank() == 0 else None


def test_checkpointing_holds_under_gradient_accumulation() -> None:
    """Two forwards are alive only one after the other; each recomputation finds its own kept results."""
    results = [run_workers(_accumulated, 2, mode)[0] for mode in ("none", "full")]
    assert not compare(results[1], results[0], 0.0)


def _accumulated(mode: str) -> Trace | None:
    parallel = replace(ParallelConfig(ep=2), activation_checkpoint=mode)
    trace = trace_layout(MODELS["qwen3"], parallel, steps=2, micro_steps=2)
    return trace if dist.get_rank() == 0 else None
