"""What a run says of itself."""

import pytest

from trainer.banner import describe_data, human


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (1200, "1.2 k"), (3_553_920, "3.55 M"), (30_532_122_624, "30.5 B"), (10**12, "1 T")]
)
def test_numbers_have_three_digits(number: int, text: str) -> None:
    assert human(number) == text


def test_every_source_has_a_line_that_tells_what_was_left_out() -> None:
    counts = {"books": {"documents": 1234, "tokens": 5_000_000, "invalid_utf8": 2, "empty_files": 0}}
    lines = describe_data("train", {**counts, "code": {"documents": 1, "tokens": 10}}).splitlines()
    assert lines == [
        "  train    books: 1,234 documents, 5 M tokens, 2 files of invalid UTF-8 skipped",
        "  train    code: 1 documents, 10 tokens",
    ]
