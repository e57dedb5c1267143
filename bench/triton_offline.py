"""Compile every launch of the Triton kernels for GPUs that are not here, and read what became of them.

    python bench/triton_offline.py                      all of it, into bench/results/triton_offline.csv (minutes)
    python bench/triton_offline.py --missing            only what that file does not have for this version of Triton
    python bench/triton_offline.py --check --quick      a few of them again, compared with that file; exit 1 if one got worse

No GPU and no driver is needed: ptxas, cuobjdump and nvdisasm are inside the triton wheel. A line is one kernel as it is launched, every
optional pointer given, for one architecture and one version of Triton; the file keeps the lines of other versions. Rules, checked on every line: no
spills, no stack, logits read and gradients written 16 bytes at a time, no arithmetic in double precision, no atomics.

Columns: registers and blocks per SM (how many programs an SM holds by its registers and threads); AMD: vector registers of a lane, programs a CU.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # bench/kernels.py would stand in for a package of that name
os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton_offline_"))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sapo_fast import triton_rows  # noqa: E402
from sapo_fast.kernels.row_grad import row_grad  # noqa: E402
from sapo_fast.kernels.row_loss import row_loss  # noqa: E402
from sapo_fast.kernels.row_stats import row_stats  # noqa: E402
from sapo_fast.kernels.scale import scale  # noqa: E402

TABLE = Path(__file__).resolve().parent / "results" / "triton_offline.csv"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KERNELS = {"row_stats": row_stats, "row_grad": row_grad, "row_loss": row_loss, "scale": scale}
DTYPES = ("bf16", "fp16", "fp32")
KEY = ("triton", "target", "kernel", "dtype", "block", "on_chip", "warps")
# Registers may move a little between builds of one version; more than this is a change to look at.
SLACK = 8


class Launch(NamedTuple):
    kernel: str
    dtype: str
    block: int
    on_chip: bool
    warps: int


def launches() -> list[Launch]:
    """Everything `triton_rows` can launch."""
    found = []
    for dtype in DTYPES:
        for limit, block, warps in triton_rows.LAUNCHES:
            found += [Launch(kernel, dtype, block, limit is not None, warps) for kernel in ("row_stats", "row_grad", "row_loss")]
        _, block, warps = triton_rows.LAUNCHES[-1]
        found.append(Launch("scale", dtype, block, False, warps))
    return found


def compile_for(launch: Launch, target: GPUTarget) -> Any:
    """As the JIT does for contiguous, aligned tensors: column stride 1, pointers, row strides and vocabulary divisible by 16."""
    fn = KERNELS[launch.kernel]
    constants = {"BLOCK": launch.block, "ON_CHIP": launch.on_chip, "HAS_B": True}
    signature, constexprs, attrs = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants or name.endswith("_col"):
            signature[name], constexprs[(i,)] = "constexpr", constants.get(name, 1)
        elif name in ("X", "OUT"):
            signature[name] = f"*{launch.dtype}"
        elif name in ("ROWS", "FIRST", "ACTIONS"):
            signature[name] = "*i64"
        elif name in ("SCALE", "FACTOR"):
            signature[name] = "*fp64"
        elif name.isupper():
            signature[name] = "*fp32"
        elif name in ("n", "total", "vocabulary", "columns", "w_plus", "w_minus") or name.startswith("stride"):
            signature[name] = "i32"
        else:
            signature[name] = "fp32"
        if name in ("X", "OUT", "vocabulary", "columns") or name.endswith("_row"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": launch.warps, "enable_fp_fusion": True})


def nvidia(launch: Launch, compiled: Any) -> dict[str, Any]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ops = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.M)
    registers = resources["REG"]
    per_block = -(-registers * 32 // 256) * 256 * launch.warps  # registers go to warps in lots of 256
    return {
        "registers": registers,
        "spills": resources["STACK"] + resources["LOCAL"] + sum(op.startswith(("LDL", "STL")) for op in ops),
        "loads_16": sum(op.startswith("LDG") and ".128" in op for op in ops),
        "stores_16": sum(op.startswith("STG") and ".128" in op for op in ops),
        "narrow_loads": sum(op.startswith("LDG") and ".128" not in op for op in ops),
        "narrow_stores": sum(op.startswith("STG") and ".128" not in op for op in ops),
        "doubles": sum(op.startswith(("DADD", "DMUL", "DFMA", "DSETP")) for op in ops),
        "atomics": sum(op.startswith(("ATOM", "RED")) and not op.startswith("REDUX") for op in ops),
        "shared_bytes": compiled.metadata.shared,
        "blocks_per_sm": min(65536 // per_block, 64 // launch.warps, 32),
        "instructions": len(ops),
    }


def amd(launch: Launch, compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text, re.M))

    registers = number("vgpr_count")
    waves = min(512 // (-(-registers // 8) * 8), 8)  # of a SIMD
    return {
        "registers": registers,
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size"),
        "loads_16": count(r"(?:global|buffer)_load_dwordx4\b"),
        "stores_16": count(r"(?:global|buffer)_store_dwordx4\b"),
        "narrow_loads": count(r"(?:global|buffer)_load_(?!dwordx4)\w+"),
        "narrow_stores": count(r"(?:global|buffer)_store_(?!dwordx4)\w+"),
        "doubles": count(r"v_(?:add|mul|fma)_f64"),
        "atomics": count(r"(?:global|buffer|flat)_atomic_"),
        "shared_bytes": compiled.metadata.shared,
        "blocks_per_sm": 4 * waves // launch.warps,
        "instructions": count(r"^\t[vs]_\w+|^\t(?:global|buffer|ds)_\w+"),
    }


# Logits are read and gradients written by the block; what else a row reads and writes are single numbers.
MOST_NARROW = {"row_stats": (4, 8), "row_grad": (16, 6), "row_loss": (16, 14), "scale": (4, 0)}


def broken_rules(launch: Launch, line: dict[str, Any]) -> list[str]:
    broken = [f"{name}: {line[name]}" for name in ("spills", "doubles", "atomics") if int(line[name])]
    loads, stores = MOST_NARROW[launch.kernel]
    if int(line["loads_16"]) == 0 or int(line["narrow_loads"]) > loads:
        broken.append(f"{line['narrow_loads']} loads narrower than 16 bytes, {line['loads_16']} of 16")
    if launch.kernel != "row_stats" and (int(line["stores_16"]) == 0 or int(line["narrow_stores"]) > stores):
        broken.append(f"{line['narrow_stores']} stores narrower than 16 bytes, {line['stores_16']} of 16")
    if int(line["blocks_per_sm"]) < 1:
        broken.append("does not fit on a multiprocessor")
    return broken


def read_table() -> dict[tuple[str, ...], dict[str, str]]:
    if not TABLE.exists():
        return {}
    with TABLE.open() as file:
        return {tuple(row[k] for k in KEY): row for row in csv.DictReader(file)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    parser.add_argument("--missing", action="store_true", help="compile what the table lacks")
    parser.add_argument("--quick", action="store_true", help="the widest launches in bf16 on sm_90 only")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated, of %(default)s")
    args = parser.parse_args()
    table, faults, seen = read_table(), [], 0
    for target in args.targets.split(","):
        for launch in launches():
            if args.quick and (
                target != "sm_90" or launch.dtype != "bf16" or launch.kernel not in ("row_loss", "row_stats") or launch.on_chip
            ):
                continue
            key = tuple(str(x) for x in (triton.__version__, target, *launch))
            if args.missing and key in table:
                continue
            compiled = compile_for(launch, TARGETS[target])
            line = amd(launch, compiled) if target.startswith("gfx") else nvidia(launch, compiled)
            seen += 1
            print(*key, *(f"{k}={v}" for k, v in line.items()), flush=True)
            faults += [f"{' '.join(key)}: {rule}" for rule in broken_rules(launch, line)]
            if not args.check:
                table[key] = dict(zip(KEY, key, strict=True)) | line
            elif not any(known[0] == triton.__version__ for known in table):
                continue  # a version nobody has recorded: the rules alone
            elif key not in table:
                faults.append(f"{' '.join(key)}: not in {TABLE.name}; run bench/triton_offline.py under this Triton and commit it")
            elif line["registers"] > int(table[key]["registers"]) + SLACK or line["blocks_per_sm"] < int(table[key]["blocks_per_sm"]):
                was = table[key]
                faults.append(f"{' '.join(key)}: {line['registers']} registers and {line['blocks_per_sm']} blocks an SM, the table has "
                              f"{was['registers']} and {was['blocks_per_sm']}")  # fmt: skip
    wanted = {tuple(str(x) for x in launch) for launch in launches()}
    table = {key: row for key, row in table.items() if key[2:] in wanted}
    if not args.check and table:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(next(iter(table.values()))))
            writer.writeheader()
            writer.writerows(table[key] for key in sorted(table))
    print(f"{seen} launches compiled with triton {triton.__version__}, {len(faults)} faults", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
