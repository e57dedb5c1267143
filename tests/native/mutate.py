"""Breaks the CUDA kernels on purpose, one line at a time, and demands that the emulator's test notices each break.

usage: mutate.py gae|rows COMPILER CSRC TESTS [--only NAME]

Every barrier of the kernels is taken out in turn, and a list of other lines is changed; each mutant is compiled and run. Exit status 1 names the
mutants that survived.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: what: (kernels, test, its number of random problems)
TARGETS = {"gae": ("gae.cuh", "test_gae_cuda.cpp", "150"), "rows": ("rows.cuh", "test_rows_cuda.cpp", "400")}

# Barriers: of a block, and the halves of a cluster's.
BARRIER = re.compile(
    r"^ *(?:if constexpr \(kCluster\) )?(__syncthreads|cluster_arrive_relaxed|cluster_arrive|cluster_wait)\(\);.*$", re.MULTILINE
)

# name, text that must occur exactly once, replacement
CHANGES = {
    "gae": [
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
    ],
    "rows": [
        ("value tokens read", "  patch<D>(v, first, p.plus, D::kMinusInfinity);\n", ""),
        ("a value token left in the gradient", "  patch<D>(v, first, p.minus, 0);\n", ""),
        ("the largest logit counted twice", "static_cast<float>(at_top - 1)", "static_cast<float>(at_top)"),
        ("no floor", "      d = d < floor ? floor : d;\n", ""),
        ("an empty share pivots on infinity", "part.top == -kInfinity<float> ? 0.0f : part.top", "part.top"),
        (
            "only the first block's share counts",
            "if (lane < cluster) part = shared.blocks[lane];",
            "if (lane < 1) part = shared.blocks[lane];",
        ),
        ("a warp's share forgotten", "  for (int by = 1; by < kLanes; by *= 2) {", "  for (int by = 2; by < kLanes; by *= 2) {"),
        ("statistics sent to one block", "store_remote(shared.blocks[rank], lane, part)", "store_remote(shared.blocks[rank], 0, part)"),
        ("the action's entry forgotten", "patch<D>(v, first, static_cast<int>(action), D::narrow(s.at_action));", "{}"),
        ("alignment of the gradient taken for that of the logits", "(first + shift) % D::kLanes == 0", "true"),
        ("column stride ignored", "    return stride == 1 && first >= 0", "    return first >= 0"),
        ("the row's end ignored", "first + D::kLanes <= width && ", ""),
        ("repeated rows written twice", "if (at < 0 || (p.first && p.first[i] != i)) return;", "if (at < 0) return;"),
        ("rows that do not exist", "row >= 0 && row < p.height ? row : -1", "row >= 0 ? row : -1"),
        ("other actions of a repeated row forgotten", "  out.data[action * out.stride] = D::narrow(", "  (void)D::narrow("),
        ("slopes not divided by the temperature", "a = p.a[i] / p.temperature;", "a = p.a[i];"),
        ("scaled where the factor is 1", "  if (by == 1.0f) return;\n", "  if (by != 1.0f) return;\n"),
    ],
}


def mutants(what: str, source: str) -> list[tuple[str, str]]:
    found = []
    for match in BARRIER.finditer(source):
        line = source[: match.start()].count("\n") + 1
        found.append((f"{match[1]} of line {line} taken out", source[: match.start()] + source[match.end() :]))
    if not found:
        sys.exit("no barrier found: this script no longer understands the source")
    for name, old, new in CHANGES[what]:
        if source.count(old) != 1:
            sys.exit(f"{name}: the text to change occurs {source.count(old)} times; bring CHANGES up to date:\n{old}")
        found.append((name, source.replace(old, new)))
    return found


def survives(what: str, compiler: str, csrc: Path, tests: Path, source: str) -> bool:
    """Whether the tests pass on this source. A mutant that does not compile counts as an error of this script."""
    kernels, test, count = TARGETS[what]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "csrc"
        shutil.copytree(csrc, copy)
        (copy / "cuda" / kernels).write_text(source)
        program = Path(folder) / "test"
        flags = ["-std=c++20", "-O1", "-w", "-DSAPO_EMULATED", "-DSAPO_FEW_SHAPES", f"-I{copy}", f"-I{tests}"]
        built = subprocess.run([compiler, *flags, str(tests / test), "-o", str(program)], capture_output=True, text=True)
        if built.returncode != 0:
            sys.exit(f"a mutant does not compile:\n{built.stderr[-2000:]}")
        return subprocess.run([str(program), count], capture_output=True, timeout=600).returncode == 0


def main() -> None:
    what, compiler, csrc, tests = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    only = sys.argv[6] if sys.argv[5:6] == ["--only"] else ""
    source = (csrc / "cuda" / TARGETS[what][0]).read_text()
    if not only and not survives(what, compiler, csrc, tests, source):
        sys.exit("the unbroken source fails its own test")
    survivors = []
    for name, mutant in mutants(what, source):
        if only in name:
            alive = survives(what, compiler, csrc, tests, mutant)
            print(f"{'SURVIVED' if alive else 'caught  '} {name}", flush=True)
            if alive:
                survivors.append(name)
    if survivors:
        sys.exit(f"not noticed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
