"""Rows from documents, and the order of everything."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trainer.loss import IGNORE_INDEX
from trainer.packing import Mixture, PackedSource, Row, empty_row, permutation, seed_key, shuffled_index
from trainer.shards import Corpus, ShardWriter, open_shard

EOS = 0


def corpus(folder: Path, lengths: list[int], label_starts: list[int] | None = None) -> Corpus:
    """Documents whose tokens are all different: document d is 100 d + 1, 100 d + 2, ..., end of text."""
    writer = ShardWriter(folder, 60000, bytes(16), shard_tokens=50)
    for d, length in enumerate(lengths):
        writer.add([100 * d + i for i in range(1, length)] + [EOS], 0 if label_starts is None else label_starts[d])
    writer.close()
    return Corpus([open_shard(str(path)) for path in sorted(folder.glob("*.tokens"))])


def as_lists(row: Row) -> list[list[int]]:
    return [array.tolist() for array in row]


def unmasked(row: Row) -> list[tuple[int, int]]:
    return [(t, y) for t, y in zip(row.tokens_S.tolist(), row.labels_S.tolist(), strict=True) if y != IGNORE_INDEX]


def test_example_of_the_docstring(tmp_path: Path) -> None:
    source = PackedSource(corpus(tmp_path, [4, 4]), 6, key=0, document_mask=True, keep_tail=True)
    first, second = as_lists(source.row(0)), as_lists(source.row(1))
    d = first[0][0] // 100
    a, b = 100 * d, 100 * (1 - d)
    assert first[0] == [a + 1, a + 2, a + 3, EOS, b + 1, b + 2]
    assert first[1] == [a + 2, a + 3, EOS, IGNORE_INDEX, b + 2, b + 3]
    assert first[2] == [0, 1, 2, 3, 0, 1]
    assert first[3] == [0, 0, 0, 0, 1, 1]
    assert second[0] == [b + 3, EOS, 0, 0, 0, 0]
    assert second[1] == [EOS, *[IGNORE_INDEX] * 5]
    assert second[2] == [0, 1, 0, 0, 0, 0]
    assert second[3] == [0, 0, -1, -1, -1, -1]


@pytest.mark.parametrize("seq_len", [1, 3, 7, 64])
def test_an_epoch_reads_each_token_once_and_learns_within_documents(tmp_path: Path, seq_len: int) -> None:
    lengths = [2, 9, 30, 3, 1, 17, 5, 80, 2]
    source = PackedSource(corpus(tmp_path, lengths), seq_len, key=3, document_mask=True, keep_tail=True)
    read: list[int] = []
    pairs: list[tuple[int, int]] = []
    for index in range(source.num_samples):
        row = source.row(index)
        read += row.tokens_S[row.document_ids_S >= 0].tolist()
        pairs += unmasked(row)
    documents = [[100 * d + i for i in range(1, n)] + [EOS] for d, n in enumerate(lengths)]
    assert Counter(read) == Counter(token for document in documents for token in document)
    # Each token but a document's last predicts the one after it, also over the end of a row.
    assert Counter(pairs) == Counter(p for doc in documents for p in pairwise(doc))


def test_epochs_differ_and_rows_can_be_read_in_any_order(tmp_path: Path) -> None:
    packed = corpus(tmp_path, [5] * 20)
    source = PackedSource(packed, 10, key=3, document_mask=True)
    assert source.num_samples == 10
    rows = [as_lists(source.row(i)) for i in range(30)]
    assert rows[:10] != rows[10:20] != rows[20:]
    again = PackedSource(packed, 10, key=3, document_mask=True)
    for index in (25, 3, 14, 29, 0):
        assert as_lists(again.row(index)) == rows[index]
    assert as_lists(PackedSource(packed, 10, key=4, document_mask=True).row(0)) != rows[0]


def test_without_document_mask_positions_run_on(tmp_path: Path) -> None:
    source = PackedSource(corpus(tmp_path, [3, 3]), 6, key=0, document_mask=False)
    row = source.row(0)
    assert row.positions_S.tolist() == [0, 1, 2, 3, 4, 5] and row.document_ids_S.tolist() == [0] * 6
    assert (row.labels_S == IGNORE_INDEX).tolist() == [False, False, True] * 2


def test_prompts_are_packed_whole_and_carry_no_loss(tmp_path: Path) -> None:
    lengths, prompts = [6, 3, 5, 2, 7, 4, 4, 3], [3, 1, 2, 1, 5, 1, 3, 0]
    source = PackedSource(corpus(tmp_path, lengths, prompts), 8, key=1, document_mask=True)
    for epoch in range(2):
        seen: list[int] = []
        for index in range(epoch * source.num_samples, (epoch + 1) * source.num_samples):
            row = source.row(index)
            for number in range(row.document_ids_S.max() + 1):
                columns = np.flatnonzero(row.document_ids_S == number)
                d = int(row.tokens_S[columns[0]]) // 100
                seen.append(d)
                assert len(columns) == lengths[d] and row.positions_S[columns].tolist() == list(range(lengths[d]))
                expected = [*(100 * d + i for i in range(2, lengths[d])), EOS, IGNORE_INDEX]
                expected[: max(prompts[d] - 1, 0)] = [IGNORE_INDEX] * max(prompts[d] - 1, 0)
                assert row.labels_S[columns].tolist() == expected
            assert (row.labels_S[row.document_ids_S < 0] == IGNORE_INDEX).all()
        assert sorted(seen) == list(range(len(lengths)))
    assert source.truncated == 0


def test_a_response_that_does_not_fit_is_cut_and_counted(tmp_path: Path) -> None:
    source = PackedSource(corpus(tmp_path, [12, 3], [4, 1]), 8, key=1, document_mask=True)
    assert (source.num_samples, source.truncated) == (2, 1)
    rows = [source.row(i) for i in range(2)]
    (long,) = [row for row in rows if row.tokens_S[0] == 1]
    assert long.tokens_S.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert long.labels_S.tolist() == [IGNORE_INDEX] * 3 + [5, 6, 7, 8, 9]


def test_order_never_changes_silently() -> None:
    """Pinned: another order would make a resumed run repeat some samples and miss others."""
    key = seed_key(0, "train", "x")
    assert permutation(8, key).tolist() == [2, 0, 6, 7, 5, 1, 3, 4]
    assert key == 14817196672577612887
    assert [Mixture({"a": 3.0, "b": 1.0}, 7).locate(i) for i in range(8)] == [
        *((0, i) for i in range(6)),
        (1, 0),
        (0, 6),
    ]


def test_permutation_is_one() -> None:
    for num in (0, 1, 2, 1000):
        assert sorted(permutation(num, 5).tolist()) == list(range(num))
    assert permutation(1000, 5).tolist() != permutation(1000, 6).tolist()
    fixed = int((permutation(100_000, 5) == np.arange(100_000)).sum())
    assert fixed < 10, "a random permutation has one fixed point on average"


def test_seed_key_takes_every_part() -> None:
    keys = {seed_key(*parts) for parts in ((1, 2), (2, 1), (12,), ("1", 2), ("1", "2"), ("1\x002",), (1, 2, 0))}
    assert len(keys) == 7


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [0.5, 0.25, 0.25], [1.0, 1.0, 1.0], [1000.0, 1.0], [0.7, 0.31]])
def test_mixture_follows_the_weights(weights: list[float]) -> None:
    mixture = Mixture({str(i): w for i, w in enumerate(weights)}, key=2)
    block = int(mixture.quotas.sum())
    places = [mixture.locate(i) for i in range(2 * block + 10)]
    for source in range(len(weights)):
        assert sorted(i for s, i in places if s == source) == list(range(sum(s == source for s, _ in places)))
    for start in (0, block):
        count = Counter(source for source, _ in places[start : start + block])
        share = np.array([count[s] for s in range(len(weights))]) / block
        # QUOTA_ERROR; the block grows until it holds.
        np.testing.assert_allclose(share, np.array(weights) / sum(weights), rtol=0.01)
    assert [mixture.locate(i) for i in (block + 3, 1)] == [places[block + 3], places[1]]


def test_mixture_interleaves_and_reshuffles_blocks() -> None:
    mixture = Mixture({"a": 1.0, "b": 1.0}, key=2)
    first, second = ([mixture.locate(b * 64 + i)[0] for i in range(64)] for b in range(2))
    assert first != second and first[:32] != [0] * 32 and sum(first) == 32


def test_mixture_refuses_a_weight_that_gives_nothing() -> None:
    with pytest.raises(ValueError, match=r"data\.train\.tiny\.weight is too small"):
        Mixture({"a": 1.0, "tiny": 1e-7}, key=0)


def test_empty_row() -> None:
    assert as_lists(empty_row(2)) == [[0, 0], [IGNORE_INDEX] * 2, [0, 0], [-1, -1]]


@pytest.mark.parametrize("num", [1, 2, 3, 7, 64, 1000, 4097])
def test_shuffled_index_is_a_permutation_that_scatters_neighbours(num: int) -> None:
    for seed in range(3):
        places = [shuffled_index(index, num, seed_key(seed, "rows")) for index in range(num)]
        assert sorted(places) == list(range(num))
        if num >= 1000:
            # Two uniform draws are num/3 apart on average.
            assert abs(np.abs(np.diff(places)).mean() / num - 1 / 3) < 0.05


def test_shuffled_index_depends_on_the_key() -> None:
    orders = {tuple(shuffled_index(index, 50, seed_key(seed)) for index in range(50)) for seed in range(5)}
    assert len(orders) == 5
