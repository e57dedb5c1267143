"""Compiles the CUDA kernels for each architecture and reports registers, spills and shared memory, as a table in Markdown.

usage: registers.py NVCC CSRC [--write]

A spill is an error. Registers and shared memory must be those on record in registers.csv (with the same release of nvcc; others differ by a few
registers), which --write brings up to date.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHS = ("80", "90", "100")
SOURCES = ("launch.cu", "rows_launch.cu")
RECORD = Path(__file__).with_name("registers.csv")

GAE = re.compile(r"gae_kernelINS0_5SizesILi\d+ELi\d+ELi\d+EEELb(?P<tokens>\d)ELb(?P<two>\d)ELi(?P<width>\d+)E")
ROWS = re.compile(
    r"(?P<kernel>resident|stream|actions|scale)_kernelINS0_\d+(?P<type>Float32|Float16|BFloat16)E(?:Li\d+E)?(?P<flags>(?:Lb\dE)*)"
)
REGIMES = {
    ("resident", "Lb0"): "one block a row",
    ("resident", "Lb1"): "a cluster a row",
    ("stream", "Lb1Lb0"): "statistics",
    ("stream", "Lb0Lb1"): "gradient",
    ("stream", "Lb1Lb1"): "both, row read twice",
    ("actions", ""): "actions of repeated rows",
    ("scale", ""): "scale in place",
}


def label(mangled: str) -> str:
    if found := GAE.search(mangled):
        tokens, two = found["tokens"] == "1", found["two"] == "1"
        return f"{'tokens' if tokens else 'turns'}, {'two lambdas' if two else 'one lambda'}, {found['width']} lanes"
    if found := ROWS.search(mangled):
        return f"rows, {found['type'].lower()}, {REGIMES[found['kernel'], found['flags'].replace('ELb', 'Lb').rstrip('E')]}"
    assert "normalize_kernel" in mangled, f"a kernel this script does not know: {mangled}"
    return "normalize"


def compile_for(nvcc: str, csrc: Path, arch: str) -> dict[str, tuple[int, int, int]]:
    """Kernel -> registers, bytes spilled, bytes of shared memory, from the report of ptxas."""
    kernels: dict[str, tuple[int, int, int]] = {}
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            command = [nvcc, "-std=c++17", "-O3", f"-I{csrc}", f"-arch=sm_{arch}", "-cubin", "-Xptxas=-v", str(csrc / "cuda" / source)]
            report = subprocess.run([*command, "-o", str(Path(folder) / "out.cubin")], capture_output=True, text=True, check=True).stderr
        name, spilled = "", 0
        for line in report.splitlines():
            if found := re.search(r"Compiling entry function '(\S+)'", line):
                name, spilled = label(found[1]), 0
            elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                spilled += int(found[1]) + int(found[2])
            elif found := re.search(r"Used (\d+) registers", line):
                shared = re.search(r"(\d+) bytes smem", line)
                assert name not in kernels, f"two kernels are called {name}"
                kernels[name] = (int(found[1]), spilled, int(shared[1]) if shared else 0)
    return kernels


def main() -> None:
    nvcc, csrc = sys.argv[1], Path(sys.argv[2])
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\S+),", said)[1]
    tables = {arch: compile_for(nvcc, csrc, arch) for arch in ARCHS}
    print("| kernel | " + " | ".join(f"sm_{arch}: registers, spilled, shared" for arch in ARCHS) + " |")
    print("|---|" + "---|" * len(ARCHS))
    rows, spills = [], []
    for name in sorted(tables[ARCHS[0]]):
        print(f"| {name} | " + " | ".join("{}, {}, {} B".format(*tables[arch][name]) for arch in ARCHS) + " |")
        for arch in ARCHS:
            registers, spilled, shared = tables[arch][name]
            rows.append([release, name, arch, str(registers), str(shared)])
            if spilled:
                spills.append(f"{name} on sm_{arch}: {spilled} bytes")
    if spills:
        sys.exit("registers are spilled: " + "; ".join(spills))
    if sys.argv[3:] == ["--write"]:
        with RECORD.open("w", newline="") as file:
            csv.writer(file).writerows([["nvcc", "kernel", "arch", "registers", "shared"], *rows])
        return
    with RECORD.open(newline="") as file:
        recorded = list(csv.reader(file))[1:]
    if recorded[0][0] != release:
        print(f"on record is nvcc {recorded[0][0]}, this is {release}: not compared")
    elif recorded != rows:
        other = [f"{row[1]} on sm_{row[2]}: {row[3]} registers, {row[4]} B" for row in rows if row not in recorded]
        sys.exit(
            f"not as on record ({RECORD.name}; after a look: registers.py NVCC CSRC --write): " + "; ".join(other or ["a kernel is gone"])
        )


if __name__ == "__main__":
    main()
