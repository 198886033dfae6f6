"""Counts bytes as an allocator would: of real tensors, or of fake ones at sizes that no test could compute with."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operators gave and somebody still has, without weights; the most of them."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in weights}
        self.storages: dict[int, tuple[Any, int]] = {}
        self.most = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def now(self) -> int:
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in self.weights:
                    continue
                known = self.storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now())
        return result
