"""The head's Triton kernels compiled for GPUs that need not be there: registers, spills, shared memory, occupancy.

    python -m convergeflow.benchmarks.compiled benchmarks/records/triton-kernels.json

Triton brings NVIDIA's assembler and the tool that reads its output, so a laptop can say whether a kernel fits a GPU.
It says nothing about time; `roofline.py` has the arithmetic.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergeflow.device import TRITON_BACKEND
from convergeflow.errors import ConvergeFlowError


@dataclass(frozen=True)
class Multiprocessor:
    """What the threads of a multiprocessor share."""

    capability: int
    shared_bytes: int
    block_shared_bytes: int
    registers: int = 65536
    warps: int = 64


CHIPS = {"A100": Multiprocessor(80, 164 << 10, 163 << 10), "H100": Multiprocessor(90, 228 << 10, 227 << 10)}

POINTERS = {
    "weights_kernel": "out h weight bias:fp32 scaled:fp32 table:fp32 scores:fp32 kernel:fp32 peak:fp32 targets:i64 "
    "target_logit:fp32 part_peak:fp32 part_total:fp32 part_best:i64 part_surprise:fp32",
    "merge_kernel": "peak:fp32 total:fp32 best:i64 surprise:fp32 factor:fp32 part_peak:fp32 part_total:fp32 "
    "part_best:i64 part_surprise:fp32",
    "rescale_kernel": "out peak:fp32 part_peak:fp32",
    "scores_kernel": "out:fp32 x:fp32 table:fp32",
    "change_kernel": "share pull table lift:fp32 factor:fp32 targets:i64 cross:fp32",
}
"""The pointers of each kernel with their formats; without one it is that of the operands. The rest are integers."""


def run(half: str = "bf16") -> dict[str, Any]:
    """Every kernel on every chip, as the paper's size uses it."""
    kernels = [
        {"chip": chip, "kernel": name, "case": case, **_resources(name, constants, warps, stages, CHIPS[chip], half)}
        for chip in CHIPS
        for name, case, constants, warps, stages in _cases()
    ]
    import triton

    return {
        "what": "kernels",
        "command": "python -m convergeflow.benchmarks.compiled",
        "triton": triton.__version__,
        "operands": half,
        "spilled": sum(kernel["spill_bytes"] for kernel in kernels),
        "kernels": kernels,
    }


def _cases() -> Iterator[tuple[str, str, dict[str, Any], int, int]]:
    """Kernel, what for, its constants, warps and stages."""
    from convergeflow.model import triton_head as head

    products, wide = head.WITH_PRODUCTS, head.WITHOUT_PRODUCTS
    for case, blocks, source, options in (
        ("training: kernel term by product, target", products, head.KERNEL_PRODUCTS, {"TARGETS": True}),
        ("sampling: shared scores", wide, head.KERNEL_SCORES, {}),
        ("sampling: shared scores, token", wide, head.KERNEL_SCORES, {"TOKEN": True}),
        ("evaluation: product, token, entropy, target", products, head.KERNEL_PRODUCTS, "TOKEN ENTROPY TARGETS"),
        ("backward, made again", products, head.KERNEL_PRODUCTS, {"FINAL": True}),
        ("base logits alone", wide, head.NO_KERNEL, {}),
    ):
        asked = dict.fromkeys(options.split(), True) if isinstance(options, str) else options
        switches = {"FINAL": False, "BIAS": True, "TARGETS": False, "TOKEN": False, "ENTROPY": False, **asked}
        even = {"EVEN_HIDDEN": True, "EVEN_DIMENSION": True, "KERNEL": source}
        yield "weights_kernel", case, {**switches, **even, **_sizes(blocks)}, blocks.warps, blocks.stages
    yield "merge_kernel", "all", {"TOKEN": True, "ENTROPY": True, "ROWS": 64}, 4, 3
    for blocks in (products, wide):
        sizes = {"ROWS": blocks.rows, "TOKENS": blocks.tokens}
        yield "rescale_kernel", f"{blocks.rows} x {blocks.tokens}", sizes, blocks.warps, 3
    sizes = {name: value for name, value in _sizes(products).items() if name != "DEPTH"}
    yield "scores_kernel", "once per grid point", {"EVEN_DIMENSION": True, **sizes}, products.warps, products.stages
    sizes = {name: value for name, value in _sizes(wide).items() if name != "KERNEL_DEPTH"}
    change = {"PULL": True, "CROSS": True, "EVEN_DIMENSION": True, **sizes}
    yield "change_kernel", "backward", change, wide.warps, wide.stages


def _sizes(blocks: Any) -> dict[str, int]:
    return {"ROWS": blocks.rows, "TOKENS": blocks.tokens, "DEPTH": blocks.depth, "KERNEL_DEPTH": blocks.kernel_depth}


def _resources(
    name: str, constants: dict[str, Any], warps: int, stages: int, chip: Multiprocessor, half: str
) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from convergeflow.model import triton_head

    kernel = getattr(triton_head, name)
    formats = dict([*word.split(":"), half][:2] for word in POINTERS[name].split())
    signature = {
        argument: "constexpr" if argument in constants else f"*{formats[argument]}" if argument in formats else "i32"
        for argument in kernel.arg_names
    }
    # As at run time: pointers and sizes are multiples of 16, but for the number of rows and the last tile's width.
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, argument in enumerate(kernel.arg_names)
        if argument in formats or argument in ("hidden", "dimension") or argument.startswith("stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    done = triton.compile(source, target=GPUTarget(TRITON_BACKEND, chip.capability, 32), options=options)
    used = _read(done.asm["cubin"])
    instructions = sorted(
        set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.(?:row\.col\.)?[\w.]+", done.asm["ptx"]))
    )
    shared = int(done.metadata.shared)
    return {
        "warps": warps,
        "stages": stages,
        "registers": used["REG"],
        "spill_bytes": used["STACK"] + used["LOCAL"],
        "shared_bytes": shared,
        "occupancy": _occupancy(used["REG"], shared, warps, chip),
        "blocks_per_multiprocessor": _blocks(used["REG"], shared, warps, chip),
        "products": instructions,
    }


def _read(cubin: bytes) -> dict[str, int]:
    """What the assembler's output says it uses."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True)
    found = {word: int(value) for word, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)}
    if done.returncode or "REG" not in found:
        raise ConvergeFlowError(f"cuobjdump could not read a kernel: {(done.stderr or done.stdout).strip()}")
    return found


def _blocks(registers: int, shared: int, warps: int, chip: Multiprocessor) -> int:
    """How many programs share a multiprocessor; registers are given to warps in portions of 256."""
    per_warp = -(-registers * 32 // 256) * 256
    by_memory = chip.shared_bytes // (shared + 1024) if shared <= chip.block_shared_bytes else 0
    return min(chip.registers // (per_warp * warps), by_memory, chip.warps // warps)


def _occupancy(registers: int, shared: int, warps: int, chip: Multiprocessor) -> float:
    """Warps that are there at once, as a share of the most that could be."""
    return _blocks(registers, shared, warps, chip) * warps / chip.warps


if __name__ == "__main__":
    text = json.dumps(run(), indent=2) + "\n"
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
