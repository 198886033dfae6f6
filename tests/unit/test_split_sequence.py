"""Tokens of a rank: the tables that say which are kept on the device that asked."""

import torch
from torch.profiler import ProfilerActivity, profile

from comms.split_sequence import SplitSequence, token_table


def test_a_rank_takes_what_its_table_says() -> None:
    whole_BS = torch.stack([torch.arange(16), torch.arange(16) + 100])
    table_NL = token_table(16, 2, 1, 2)
    for rank in range(4):
        place = SplitSequence(2, 1, 2, rank, "")
        assert place.part(whole_BS).tolist() == whole_BS[:, table_NL[rank]].tolist()
        tokens = torch.cat([table_NL[rank // 2 * 2], table_NL[rank // 2 * 2 + 1]])
        assert place.attention_part(whole_BS).tolist() == whole_BS[:, tokens].tolist()


def test_a_table_is_made_once_per_device_and_trains_after_an_evaluation() -> None:
    """Made for every batch, it would be copied to the device every time, and the host would wait for that."""
    place, x_BS = SplitSequence(1, 1, 2, 1, ""), torch.randn(1, 12, requires_grad=True)
    with torch.inference_mode():
        place.part(torch.randn(1, 12))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        place.part(x_BS).sum().backward()
    assert x_BS.grad is not None and x_BS.grad.tolist() == [[0.0] * 6 + [1.0] * 6]
    assert "aten::arange" not in {event.key for event in seen.key_averages()}
