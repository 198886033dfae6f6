"""Compiles a Gluon kernel for SM90 without a card, and asks the assembler about it."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

SM90 = GPUTarget("cuda", 90, 32)
# What a program can have on an H100 or H200, in bytes.
MOST_SHARED = 227 * 1024


class Compiled(NamedTuple):
    """Code of a kernel, its shared memory in bytes, its warps, bytes of registers that are spilled; and its walks.

    Walks over experts: loops that hand on the step and the first tile. See moe.kernels.warps_sm90.next_expert.
    """

    ptx: str
    shared: int
    warps: int
    spilled: int
    walks: int


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: list[str]) -> Compiled:
    """Compile it for SM90, 4 warps at its start.

    Args:
        types: of the arguments that are no int32.
        aligned: arguments that are multiples of 16.
    """
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=SM90, options={"num_warps": 4})
    ptx, known = compiled.asm["ptx"], compiled.metadata
    walks = len(re.findall(r"scf\.for .* = %first\) -> \(i32, i32\)", compiled.asm["ttgir"]))
    return Compiled(ptx, known.shared, known.num_warps, _spilled(ptx), walks)


def _spilled(ptx: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        said = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))
