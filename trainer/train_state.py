"""Model and optimizer as one flat dict of named tensors, and copies of it that training does not touch.

    model.<parameter or buffer>           as in `model.state_dict()`: shards (DTensor) stay shards
    optim.<parameter>.<step | exp_avg | ...>

Optimizer state is named by parameter and not by its place in a parameter group: groups depend on the layout, names do
not. Hyperparameters (learning rate, betas, weight decay) are not stored: they come from the config and the schedule,
so that a checkpoint can never bring an old learning rate back.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from parallel.init import clean_name

MODEL = "model."
OPTIM = "optim."
_LISTED = 10
# Copies start at multiples of this, so that any dtype can be viewed there.
_ALIGNMENT_BYTES = 64


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers, by `model.` + name. Writing into them changes the model."""
    tensors = {MODEL + clean_name(name): value for name, value in model.state_dict().items()}
    odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"a checkpoint holds tensors only; the model's state has others: {_listing(odd)}")
    empty = [name for name, value in tensors.items() if value.is_meta]
    if empty:
        raise ValueError(f"these tensors have no memory yet (meta device), allocate them first: {_listing(empty)}")
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Live optimizer state by `optim.` + parameter + `.` + key. Parameters that were never stepped have none."""
    tensors: dict[str, Tensor] = {}
    for param, name, _ in _optimizer_params(model, optimizer):
        for key, value in optimizer.state.get(param, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or "." in key or value.shape not in ((), param.shape):
                raise ValueError(
                    f"optimizer state {key!r} of {name} is neither a scalar tensor nor of its parameter's shape: "
                    f"{type(optimizer).__name__} cannot be checkpointed"
                )
            tensors[f"{OPTIM}{name}.{key}"] = value
    return tensors


def saved_optimizer_state(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Descriptions of the optimizer state that a checkpoint holds, by name."""
    saved = metadata.state_dict_metadata.items()
    return {n: d for n, d in saved if n.startswith(OPTIM) and isinstance(d, TensorStorageMetadata)}


def allocate_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors for what a checkpoint holds; returns them by name.

    Args:
        saved: as `saved_optimizer_state` gives it.

    Raises:
        ValueError: the checkpoint has state of parameters that this optimizer does not have, or of another shape.
    """
    optimizer.state.clear()
    by_param: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, description in saved.items():
        param_name, key = name.removeprefix(OPTIM).rsplit(".", 1)
        by_param.setdefault(param_name, {})[key] = description
    tensors: dict[str, Tensor] = {}
    for param, name, group in _optimizer_params(model, optimizer):
        for key, description in by_param.pop(name, {}).items():
            value = _empty_state(param, group, f"{name}.{key}", description)
            optimizer.state[param][key] = tensors[f"{OPTIM}{name}.{key}"] = value
    if by_param:
        raise ValueError(f"the checkpoint has optimizer state of unknown parameters: {_listing(by_param)}")
    return tensors


def _optimizer_params(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[nn.Parameter, str, dict[str, Any]]]:
    names = {param: clean_name(name) for name, param in model.named_parameters()}
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    if any(param not in names for param, _ in params):
        raise ValueError("the optimizer has parameters that are not the model's: build it after the model is sharded")
    return [(param, names[param], group) for param, group in params]


def _empty_state(param: nn.Parameter, group: dict[str, Any], name: str, saved: TensorStorageMetadata) -> Tensor:
    dtype = saved.properties.dtype
    if saved.size == torch.Size(()) and (param.ndim > 0 or name.endswith(".step")):
        # The rule of torch's optimizers: step counts stay on the host unless kernels read them.
        on_device = bool(group.get("fused") or group.get("capturable"))
        return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
    if saved.size == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    raise ValueError(f"optimizer state {name} has shape {tuple(saved.size)}, its parameter {tuple(param.shape)}")


def check_names(wanted: Mapping[str, Tensor], metadata: Metadata, prefix: str, *, same_dtype: bool) -> None:
    """Compare tensors to be filled with what a checkpoint holds under `prefix`.

    Raises:
        ValueError: with the names that are missing, unexpected, or of another shape (or dtype, if `same_dtype`).
    """
    saved = {name: value for name, value in metadata.state_dict_metadata.items() if name.startswith(prefix)}
    problems = {
        "missing in the checkpoint": [name for name in wanted if name not in saved],
        "unexpected in the checkpoint": [name for name in saved if name not in wanted],
        "of another shape": [],
        "of another dtype": [],
    }
    for name, tensor in wanted.items():
        description = saved.get(name)
        if not isinstance(description, TensorStorageMetadata):
            continue
        if description.size != tensor.shape:
            text = f"{name} (checkpoint {tuple(description.size)}, here {tuple(tensor.shape)})"
            problems["of another shape"].append(text)
        elif same_dtype and description.properties.dtype != tensor.dtype:
            problems["of another dtype"].append(f"{name} (checkpoint {description.properties.dtype}, {tensor.dtype})")
    texts = [f"{len(names)} {what}: {_listing(names)}" for what, names in problems.items() if names]
    if texts:
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(texts))


def _listing(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


class Staging:
    """One block of host memory, as large as this rank's shards, into which they are copied before a background save.

    Kept from save to save, and page-locked when the tensors are on a GPU (exactly its size: torch's own allocator of
    page-locked memory rounds every tensor up to a power of two).
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host that the next optimizer step cannot change; complete on return.

        They stay valid until the next call.
        """
        locals_ = {name: _local(tensor).detach() for name, tensor in tensors.items()}
        self._reserve(sum(_aligned(tensor.nbytes) for tensor in locals_.values()), locals_)
        copies: dict[str, Tensor] = {}
        start = 0
        for name, local in locals_.items():
            room = self._memory[start : start + local.nbytes].view(local.dtype).view(local.shape)
            room.copy_(local, non_blocking=self._pinned)
            start += _aligned(local.nbytes)
            copies[name] = _like(tensors[name], room)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _reserve(self, nbytes: int, tensors: Mapping[str, Tensor]) -> None:
        if self._memory.nbytes == nbytes:
            return
        self.release()
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes and any(tensor.is_cuda for tensor in tensors.values()):
            # 0 is success; where the system refuses to lock that much, copies are slower and still right.
            self._pinned = int(_cuda_runtime().cudaHostRegister(self._memory.data_ptr(), nbytes, 0)) == 0


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    """`local` in the place of `tensor`'s shard. (`DTensor.from_local` would move it to the mesh's device.)"""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
