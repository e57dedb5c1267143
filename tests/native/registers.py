"""Compiles the CUDA kernels for each architecture and reports registers and spills, as a table in Markdown; a spill is an error.

usage: registers.py NVCC CSRC [ARCH ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

KERNEL = re.compile(r"gae_kernelINS0_5SizesILi\d+ELi\d+ELi\d+EEELb(?P<tokens>\d)ELb(?P<two>\d)ELi(?P<width>\d+)E")


def label(mangled: str) -> str:
    found = KERNEL.search(mangled)
    if not found:
        return "normalize"
    parts = [
        "tokens" if found["tokens"] == "1" else "turns",
        "two lambdas" if found["two"] == "1" else "one lambda",
        f"{found['width']} lanes",
    ]
    return ", ".join(parts)


def compile_for(nvcc: str, csrc: Path, arch: str) -> dict[str, tuple[int, int, int]]:
    """Kernel -> registers, bytes spilled, bytes of shared memory, from the report of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++17", "-O3", f"-I{csrc}", f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", str(csrc / "cuda" / "launch.cu")]
        report = subprocess.run([*command, "-o", str(Path(folder) / "out.cubin")], capture_output=True, text=True, check=True).stderr
    kernels, name, spilled = {}, "", 0
    for line in report.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            name = label(found[1])
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(found[1]) + int(found[2])
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name] = (int(found[1]), spilled, int(shared[1]) if shared else 0)
    return kernels


def main() -> None:
    nvcc, csrc, archs = sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or ["80", "90", "100"]
    tables = {arch: compile_for(nvcc, csrc, arch) for arch in archs}
    print("| kernel | " + " | ".join(f"sm_{arch}: registers, spilled, shared" for arch in archs) + " |")
    print("|---|" + "---|" * len(archs))
    spills = []
    for name in sorted(tables[archs[0]]):
        cells = []
        for arch in archs:
            registers, spilled, shared = tables[arch][name]
            cells.append(f"{registers}, {spilled}, {shared} B")
            if spilled:
                spills.append(f"{name} on sm_{arch}: {spilled} bytes")
        print(f"| {name} | " + " | ".join(cells) + " |")
    if spills:
        sys.exit("registers are spilled: " + "; ".join(spills))


if __name__ == "__main__":
    main()
