"""What comms/split_sequence.py asks of a sequence, without torch."""


def sequence_unit(ring: int, ulysses: int, tp: int) -> int:
    """What the length of a sequence must be a multiple of."""
    # Two chunks per ring rank, which together divide by the ranks inside it.
    return (2 * ring if ring > 1 else 1) * ulysses * tp
