"""Whose matmuls overlap with the transfer of their tokens under tensor parallelism (`parallel.async_tp`), and how many.

    native      our own (comms/async_tp.py), through AsyncTensorParallelMaps: counted when the model is built
    inductor    a pass of torch's compiler, which joins matmuls to gathers and reduce-scatters: counted when compiled

Asking for it and getting nothing is an error in both.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from comms.async_tp import work_to_overlap
from comms.peer_buffers import set_timeout
from comms.symmetric_memory import unavailable
from parallel.mesh import Mesh
from parallel.tensor_parallel import AsyncTensorParallelMaps, Transfer


@dataclass
class AsyncChoice:
    """What overlaps in this run."""

    mode: str
    # Maps whose matmul overlaps; those of `inductor` are not known before the first step.
    num_fused: int
    _counted: bool = field(default=False, repr=False)

    def check_compiled(self) -> str | None:
        """After a step: what the compiler fused, told once.

        Raises:
            RuntimeError: nothing.
        """
        if self.mode != "inductor" or self._counted:
            return None
        self._counted, self.num_fused = True, fused_by_inductor().count
        if self.num_fused == 0:
            raise RuntimeError(
                "parallel.async_tp=inductor: the compiler fused no matmul with a gather or reduce-scatter; set "
                "parallel.async_tp=native, or none"
            )
        return f"async tensor parallelism: inductor fused {self.num_fused} matmuls of the graphs compiled so far"


def connect_async_tp(model: nn.Module, mesh: Mesh, num_rows: int) -> AsyncChoice:
    """Prepare what `parallel.async_tp` asks for, once layout and precision are applied. Collective over tp.

    Args:
        num_rows: tokens of one pass inside layers, those of all tp ranks.

    Raises:
        ValueError: nothing would overlap, or it cannot work here.
    """
    mode = mesh.config.async_tp
    if mode != "inductor":
        _stop_inductor()
    if mode == "none":
        return AsyncChoice("none", 0)
    assert mesh.tp is not None
    if mode == "inductor":
        _prepare_inductor(mesh)
        return AsyncChoice("inductor", 0)
    if mesh.device.type == "cuda" and (reason := unavailable(mesh.tp.get_group(), mesh.device)):
        raise ValueError(f"parallel.async_tp=native cannot run here: {reason}; set parallel.async_tp=none")
    found = transfers_of(model, num_rows)
    if not found:
        raise ValueError(
            "parallel.async_tp=native finds no matmul to fuse: the model has none that tensor parallelism splits; set "
            "parallel.async_tp=none"
        )
    least = [work_to_overlap(mesh.device, mesh.tp.size(), scatters=transfer.scatters) for transfer in found]
    num_fused = sum(transfer.maps for transfer, work in zip(found, least, strict=True) if transfer.work >= work)
    if num_fused == 0:
        rows = min(-(-work * num_rows // transfer.work) for transfer, work in zip(found, least, strict=True))
        raise ValueError(
            f"parallel.async_tp=native fuses none of {sum(transfer.maps for transfer in found)} matmuls: a pass has "
            f"{num_rows} tokens (train.micro_batch_size x train.seq_len / parallel.cp), and with this model and "
            f"parallel.tp overlapping pays from {rows}; make it larger, or set parallel.async_tp=none"
        )
    set_timeout(mesh.tp.get_group().group_name, mesh.config.timeout_seconds)
    return AsyncChoice("native", num_fused)


def transfers_of(model: nn.Module, num_rows: int) -> list[Transfer]:
    """Of all maps that tensor parallelism splits, in a pass of so many tokens."""
    return [
        transfer
        for module in model.modules()
        if isinstance(maps := getattr(module, "maps", None), AsyncTensorParallelMaps)
        for transfer in maps.transfers(module, num_rows)
    ]


def _prepare_inductor(mesh: Mesh) -> None:
    assert mesh.tp is not None
    if mesh.device.type != "cuda":
        raise ValueError("parallel.async_tp=inductor needs GPUs; set parallel.async_tp=native, or none")
    if reason := unavailable(mesh.tp.get_group(), mesh.device):
        raise ValueError(f"parallel.async_tp=inductor cannot run here: {reason}; set parallel.async_tp=none")
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.tp.get_group().group_name)
    inductor._micro_pipeline_tp = True
    inductor.post_grad_custom_post_pass = fused_by_inductor()


def _stop_inductor() -> None:
    """A process may lay out several models, one after the other."""
    if fused_by_inductor.cache_info().currsize:
        from torch._inductor import config as inductor

        inductor._micro_pipeline_tp, inductor.post_grad_custom_post_pass = False, None


@functools.cache
def fused_by_inductor() -> Any:
    """A pass after the compiler's own that counts, in `count`, matmuls that have a transfer in them."""
    # Imported here: it takes seconds.
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class CountFused(CustomGraphPass):
        count = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                name = str(node.target)
                if name.startswith("symm_mem.fused_all_gather"):
                    self.count += len(node.args[1])
                elif name.startswith("symm_mem.fused_") and "reduce_scatter" in name:
                    self.count += 1

        def uuid(self) -> None:
            # A graph from the cache would not pass here.
            return None

    return CountFused()
