"""The fp8 products for SM90, compiled without a card: that Triton takes them, and that their registers suffice.

What they compute is tested on a GPU (tests/gpu/test_fp8_gemm.py): Gluon has no interpreter.
"""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from moe.kernels.fp8_gemm_sm90 import STAGES, SWIZZLED, fp8_kernel

SM90 = GPUTarget("cuda", 90, 32)
# What a program can have on an H100 or H200, in bytes.
SHARED = 227 * 1024


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("clamped", [False, True])
def test_compiles_without_spilling(gated: bool, clamped: bool, tmp_path: Path) -> None:
    constants = {"PROGRAMS": 132, "STAGES": STAGES, "GROUP": 8, "GATED": gated, "CLAMPED": clamped}
    constants |= {"LIMIT": 7.0, "SLOPE": 1.702, "CARD": True}
    types = {
        "a_desc": f"tensordesc<fp8e4nv[64, 128],{SWIZZLED}>",
        "b_desc": f"tensordesc<fp8e4nv[128, 128],{SWIZZLED}>",
    }
    types |= {"a_scales": "*u8", "b_scales": "*u8", "offsets": "*i32", "out": "*bf16"}
    types |= {"weights": "*fp32", "act": "*u8", "act_scales": "*u8"}
    absent = {} if gated else dict.fromkeys(("weights", "act", "act_scales"))
    names = fp8_kernel.arg_names
    known = constants | absent
    signature = {name: "constexpr" if name in known else types.get(name, "i32") for name in names}
    aligned = [name for name in ("out", "act", "inner", "width") if name not in known]
    source = GluonASTSource(
        fp8_kernel,
        signature,
        {(names.index(name),): value for name, value in known.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    kernel = triton.compile(source, target=SM90, options={"num_warps": 4})
    assert kernel.metadata.shared <= SHARED
    # Two warpgroups that multiply, and one for the warp that brings blocks.
    assert kernel.metadata.num_warps == 12
    assert re.findall(r"(\d+) bytes spill stores", assembler_says(kernel.asm["ptx"], tmp_path)) == ["0"]
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", kernel.asm["ptx"])) == 16


def assembler_says(ptx: str, folder: Path) -> str:
    (folder / "kernel.ptx").write_text(ptx)
    command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stderr
