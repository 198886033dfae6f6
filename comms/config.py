"""Settings of the exchange of rows between ranks."""

from dataclasses import dataclass, field


@dataclass
class PayloadConfig:
    """What rows are sent as: model (the activation dtype) or mxfp8. Gradients travel the other way round."""

    dispatch: str = "model"
    combine: str = "model"
    dispatch_grad: str = "model"
    combine_grad: str = "model"


@dataclass
class CommsConfig:
    """How rows are exchanged: backend, precision on the wire, bounds."""

    # auto | collective | symm_mem | nvshmem. auto is symm_mem within a host where rows can travel beside work and all
    # that can come fits the GPUs' memory, else collective. Settings below that are for symm_mem need it said.
    backend: str = "auto"
    payload: PayloadConfig = field(default_factory=PayloadConfig)
    # Room for the rows that a rank receives in one dispatch, as a multiple of its own tokens (of a full micro-batch,
    # times etp). For symm_mem and nvshmem; null means the most that can come: every rank's tokens. More rows than that
    # stop the run before they change a weight.
    capacity: float | None = None
    # Token chunks that are pipelined through dispatch, experts and combine. More than one need backend=symm_mem and
    # model.moe.backend=fused.
    chunks: int = 1
    # Thread blocks that move rows; null means chosen by size.
    num_ctas: int | None = None
    # Measure how long devices stand still for rows that travel (perf/exposed_exchange_seconds): takes the host some
    # microseconds per exchange. For backend=symm_mem and model.moe.backend=fused.
    measure: bool = False
    # Consecutive ranks of parallel.ep that share fast links. Where there are several such nodes, a row crosses the
    # network once to each node that needs it, and is passed on there. null means what the hosts of the ranks say.
    ranks_per_node: int | None = None
    # What layers keep for backward shares one arena, with room for this multiple of the expected load of all layers in
    # one micro-batch; null means tensors of each layer's own, with room for the most that can come. What finds no room
    # stops the run before it changes a weight. For backend=symm_mem and model.moe.backend=fused.
    saved_headroom: float | None = None
