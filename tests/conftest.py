"""What holds for every test: one thread per process, no run id or scheduler from outside, and GPU tests skipped where
there is no GPU."""

import os

import pytest

# Before torch is imported: the test processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is looked up on a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for _name in ("SLUICEGATE_RUN_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(_name, None)


def _gpus_needed(item: pytest.Item) -> int:
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None:
        share = multi.kwargs.get("may_share") and os.environ.get("SHARE_GPU") == "1"
        return 1 if share else (*multi.args, 2)[0]
    return 1 if item.get_closest_marker("gpu") is not None else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are."""
    needing = [(item, _gpus_needed(item)) for item in items]
    needing = [(item, needed) for item, needed in needing if needed]
    if not needing:
        return
    import torch

    found = torch.cuda.device_count()
    for item, needed in needing:
        if needed > found:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {found}"))
