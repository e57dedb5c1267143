"""Breaks the CUDA kernels on purpose, one line at a time, and demands that the emulator's test notices each break.

usage: mutate.py COMPILER CSRC TESTS [--only NAME]

Every `__syncthreads()` of the kernels is taken out in turn, and a list of other lines is changed; each mutant is compiled and run. Exit status 1
names the mutants that survived.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = "150"

# name, text that must occur exactly once, replacement
CHANGES = [
    ("publish without a release", "  store_release(ready + i, 1u);", "  ready[i] = 1u;"),
    ("collect without waiting", "    while (load_acquire(ready + first + lane) == 0u) spin_pause();", ""),
    (
        "compose in the wrong order",
        "if (lane + by < 32) m.of[k] = compose(m.of[k], later);",
        "if (lane + by < 32) m.of[k] = compose(later, m.of[k]);",
    ),
    ("tile numbers from the block index", "w.tiles - 1 - shared.ticket;", "w.tiles - 1 - static_cast<int64_t>(blockIdx.x);"),
    ("last group skipped", "through(collect<kTwo>(w.tile_maps, w.tile_ready, last_group * S::kGroup, last, lane));", ""),
    (
        "a tile short of the group",
        "collect<kTwo>(w.tile_maps, w.tile_ready, tile + 1, group_end, lane)",
        "collect<kTwo>(w.tile_maps, w.tile_ready, tile + 2, group_end, lane)",
    ),
    ("second trajectory of a tile forgotten", "    b = last;\n", "    break;\n"),
    ("masked values read", "  if (e.action) e.value = p.values[t];", "  e.value = p.values[t];"),
    ("first block merges the moments", "shared.order != static_cast<unsigned>(w.blocks() - 1)", "shared.order != 0u"),
]


def mutants(source: str) -> list[tuple[str, str]]:
    found = []
    for match in re.finditer(r"^ *__syncthreads\(\);.*$", source, re.MULTILINE):
        line = source[: match.start()].count("\n") + 1
        found.append((f"barrier of line {line} taken out", source[: match.start()] + source[match.end() :]))
    if not found:
        sys.exit("no barrier found: this script no longer understands the source")
    for name, old, new in CHANGES:
        if source.count(old) != 1:
            sys.exit(f"{name}: the text to change occurs {source.count(old)} times; bring CHANGES up to date:\n{old}")
        found.append((name, source.replace(old, new)))
    return found


def survives(compiler: str, csrc: Path, tests: Path, source: str) -> bool:
    """Whether the tests pass on this source. A mutant that does not compile counts as an error of this script."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "csrc"
        shutil.copytree(csrc, copy)
        (copy / "cuda" / "gae.cuh").write_text(source)
        program = Path(folder) / "test"
        flags = ["-std=c++20", "-O1", "-w", "-DSAPO_EMULATED", "-DSAPO_FEW_SHAPES", f"-I{copy}", f"-I{tests}"]
        built = subprocess.run([compiler, *flags, str(tests / "test_gae_cuda.cpp"), "-o", str(program)], capture_output=True, text=True)
        if built.returncode != 0:
            sys.exit(f"a mutant does not compile:\n{built.stderr[-2000:]}")
        return subprocess.run([str(program), CASES], capture_output=True, timeout=600).returncode == 0


def main() -> None:
    compiler, csrc, tests = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    only = sys.argv[5] if sys.argv[4:5] == ["--only"] else ""
    source = (csrc / "cuda" / "gae.cuh").read_text()
    if not only and not survives(compiler, csrc, tests, source):
        sys.exit("the unbroken source fails its own test")
    survivors = []
    for name, mutant in mutants(source):
        if only in name:
            alive = survives(compiler, csrc, tests, mutant)
            print(f"{'SURVIVED' if alive else 'caught  '} {name}", flush=True)
            if alive:
                survivors.append(name)
    if survivors:
        sys.exit(f"not noticed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
