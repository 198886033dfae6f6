"""torchtitan's `parallel_dims`, and nothing else of it.

Its package imports all of its models as it starts, and those torch's compiler: on a CPU a third of the time that a
process needs before it can train.
"""

import importlib
import importlib.util
import sys
from typing import Any

# Registers the backend of axes of size 1, which the start of the package would bring.
import torch.testing._internal.distributed.fake_pg  # noqa: F401


def import_alone(name: str) -> Any:
    """A module of a package whose own start does not run. Whoever imports the package later begins anew.

    Meanwhile the package is not whole: no other thread may import it.

    Raises:
        ModuleNotFoundError: there is no such package, or no such module in it.
    """
    package = name.split(".")[0]
    if package in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    sys.modules[package] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(name)
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == package]:
            del sys.modules[loaded]


parallel_dims = import_alone("torchtitan.distributed.parallel_dims")
