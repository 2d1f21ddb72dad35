"""Compiles a launch ahead of time, without a card, as a launch on one would."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo_kernels.launch import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_DIVISIBLE = [["tt.divisibility", 16]]
# By compute capability: what a program may take.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


class Resources(NamedTuple):
    """What one kernel takes, and its PTX."""

    stack_bytes: int  # a thread's, spills included
    local_bytes: int
    registers: int
    shared_bytes: int  # a program's, static and dynamic
    ptx: str


def compile_launch(launch: Launch, capability: int) -> Resources:
    """`capability` is 80, 90, ...; pointers count as 16-byte aligned, as torch allocates them.

    Integers are specialised as the runtime does: 1 is a constant, multiples of 16 are known as
    such. Without these attributes loads would not be vectorised: other code than what runs.
    """
    kernel = launch.kernel
    names = kernel.arg_names
    plain = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, value) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(index,)] = _DIVISIBLE
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in plain:
            constants[name] = 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and name not in plain:
                attributes[(index,)] = _DIVISIBLE
    signature = {name: signature.get(name, "constexpr") for name in names}
    binary = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    usage = _resource_usage(binary.asm["cubin"])
    return Resources(
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        registers=usage["REG"],
        shared_bytes=max(usage["SHARED"], 0) + binary.metadata.shared,
        ptx=binary.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", output)}
