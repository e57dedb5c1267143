"""GAE: ours against the loops of other trainers, and against the time to copy the same bytes.

    python bench/gae.py [--threads N] [--device cpu|cuda] [--out bench/results] [--quick]

Writes gae_cpu_t<threads>.csv or gae_cuda.csv, and the same as .png. Rivals are written here from their published definitions, because their
packages pull whole training stacks: verl's `compute_gae_advantage_return`, the loop TRL's PPO trainer had, OpenRLHF's `get_advantages_and_returns`.
All work on padded [B, longest] tensors; padding is not timed, nor is whitening. torchrl's `vec_generalized_advantage_estimate` is used where it
is installed. Methods take turns, round by round; a cell is the median over rounds. Ours computes three results (advantages, V and Q targets), the
rivals two.

Legend: B trajectories, T turns (or tokens) in all.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sapo_fast import backends, reference, token_gae, turn_gae

GAMMA, LAM = 0.99, 0.95
SLOW = 1.0  # seconds: a method beyond it runs once
BUDGET = 2.5  # seconds a method may take in a case


@dataclass
class Case:
    """One workload, packed and padded."""

    name: str
    lengths: list[int]
    mask: Tensor | None = None  # [T] bool: tokens, and which of them are actions

    def __post_init__(self) -> None:
        self.counts = torch.tensor(self.lengths)
        self.cu = torch.cat([torch.zeros(1, dtype=torch.int64), self.counts.cumsum(0)])
        self.total, self.longest = int(self.cu[-1]), max(self.lengths)
        # Sets of arrays used in turn, so that large cases come from memory and not from the cache.
        sets = 1 if self.total < 500_000 else 6
        self.sets = [tuple(torch.randn(3, self.total, generator=torch.Generator().manual_seed(seed))) for seed in range(sets)]
        if self.mask is not None:  # verl drops what an observation token is paid; ours gives it to the action before
            self.sets = [(r * self.mask, v, q) for r, v, q in self.sets]
        self.next = 0

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        self.next += 1
        return self.sets[self.next % len(self.sets)]

    def to(self, device: str) -> None:
        self.cu = self.cu.to(device)
        self.counts = self.counts.to(device)
        self.sets = [tuple(x.to(device) for x in arrays) for arrays in self.sets]
        self.mask = None if self.mask is None else self.mask.to(device)

    def padded(self, x: Tensor) -> Tensor:
        """[B, longest], zeros at the end."""
        out = x.new_zeros(len(self.lengths), self.longest)
        out[self.inside()] = x
        return out

    def inside(self) -> Tensor:
        return torch.arange(self.longest, device=self.counts.device) < self.counts[:, None]

    def packed(self, x: Tensor) -> Tensor:
        return x[self.inside()]


# ------------------------------------------------------------------------------------------------------------------- rivals


def verl_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """verl 0.9, core_algos.compute_gae_advantage_return: column by column, carrying the last value and advantage over masked columns."""
    next_values: Tensor | float = 0.0
    last: Tensor | float = 0.0
    found = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        here = delta + GAMMA * LAM * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = here * mask[:, t] + (1 - mask[:, t]) * last
        found.append(last)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + values


def trl_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The loop of TRL's PPO trainer (before 1.16 removed it): no mask in the recursion."""
    last: Tensor | float = 0.0
    found = []
    width = rewards.shape[1]
    for t in reversed(range(width)):
        next_values = values[:, t + 1] if t < width - 1 else 0.0
        last = rewards[:, t] + GAMMA * next_values - values[:, t] + GAMMA * LAM * last
        found.append(last)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + values


def openrlhf_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """OpenRLHF 0.11, get_advantages_and_returns: values and rewards times the mask, then the same recursion."""
    return trl_loop(rewards * mask, values * mask, mask)


def torchrl_vectorised(case: Case) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """torchrl on the packed turns, as it takes ragged data: one row, `done` at the end of every trajectory."""
    try:
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate as estimate
    except ImportError:
        return None
    equal = len(set(case.lengths)) == 1
    shape = (len(case.lengths), case.longest, 1) if equal else (1, case.total, 1)
    done = torch.zeros(case.total, dtype=torch.bool, device=case.cu.device)
    done[case.cu[1:] - 1] = True

    def run(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        following = torch.where(done, 0.0, values.roll(-1))
        a, returns = estimate(GAMMA, LAM, *(x.reshape(shape) for x in (values, following, rewards, done)))
        return a.flatten(), returns.flatten()

    return run


# ------------------------------------------------------------------------------------------------------------------ methods


def methods(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """Name -> call without arguments. Rivals' padded inputs are made once, outside the timing."""
    native = "cuda" if device == "cuda" else "cpp"
    ways: dict[str, Callable[[], Any]] = {}
    if case.mask is None:

        def ours(impl: str, check: bool) -> Callable[[], Any]:
            def run() -> Any:
                r, v, q = case.arrays()
                return turn_gae(r, v, q, cu_turns=case.cu, gamma=GAMMA, lam=LAM, impl=impl, check=check)

            return run

        ways[native] = ours(native, True)
        ways[f"{native}, check=False"] = ours(native, False)
        ways["torch"] = ours("torch", True)
        ways["copy of the same bytes"] = lambda: [x.clone() for x in case.arrays()]
    else:

        def ours_tokens(impl: str) -> Callable[[], Any]:
            def run() -> Any:
                r, v, _ = case.arrays()
                return token_gae(r, v, case.mask, cu_tokens=case.cu, gamma=GAMMA, lam=LAM, impl=impl)

            return run

        def operator() -> Any:
            r, v, _ = case.arrays()
            return torch.ops.sapo_fast.token_gae(r, v, None, case.mask, case.cu, GAMMA, LAM, LAM, False, False)

        ways[native] = ours_tokens(native)
        ways[f"{native}, check=False"] = operator
        ways["torch"] = ours_tokens("torch")
        ways["copy of the same bytes"] = lambda: [x.clone() for x in (*case.arrays()[:2], case.mask)]
    if device == "cuda" and case.mask is None:
        ways["cuda, graph replay"] = graph(ways["cuda, check=False"])
    r, v, _ = case.sets[0]
    keep = torch.ones_like(r) if case.mask is None else case.mask.float()
    rewards, values, mask = (case.padded(x) for x in (r, v, keep))
    for name, loop in {"verl loop": verl_loop, "TRL loop": trl_loop, "OpenRLHF loop": openrlhf_loop}.items():
        if case.mask is None or loop is verl_loop:  # the others recurse through observation tokens: another result
            ways[name] = lambda loop=loop: (
                tuple(case.packed(x) for x in loop(rewards, values, mask)) if CHECKING else loop(rewards, values, mask)
            )
    if case.mask is None and (vectorised := torchrl_vectorised(case)) is not None:
        ways["torchrl vectorised"] = lambda: vectorised(r, v)
    return ways


CHECKING = False  # the rivals' padded results are packed again to measure errors, never while timing


def graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, captured once into a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()

    def replay() -> Any:
        captured.replay()
        return result

    return replay


def right_answer(case: Case) -> tuple[Tensor, Tensor]:
    """Advantages and V targets of the first set of arrays, float64."""
    r, v, _ = (x.double().cpu() for x in case.sets[0])
    if case.mask is not None:
        return reference.token_gae(r, v, case.mask.cpu(), cu_tokens=case.cu.cpu(), gamma=GAMMA, lam=LAM)
    found = turn_gae(r, v, cu_turns=case.cu.cpu(), gamma=GAMMA, lam=LAM, impl="torch")
    return found.advantages, found.v_targets


def error(case: Case, call: Callable[[], Any], right: tuple[Tensor, Tensor]) -> float:
    """Largest deviation of advantages and V targets; masked tokens aside."""
    global CHECKING
    case.next, CHECKING = -1, True  # the first set of arrays
    found = call()
    CHECKING = False
    keep = slice(None) if case.mask is None else case.mask.cpu()
    return max(float((a.cpu().double() - b)[keep].abs().max()) for a, b in zip(found[:2], right, strict=True))


# ------------------------------------------------------------------------------------------------------------------- timing


def clock(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Seconds a call, after one that brings its data to the caches."""
    if repeats > 1:
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure(ways: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, list[float]]:
    """Interleaved: every method once a round, a round long enough to read the clock."""
    first = {name: clock(call, 1, device) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [seconds] if seconds > SLOW else [] for name, seconds in first.items()}
    quick = {name: clock(call, 1, device) for name, call in ways.items() if first[name] <= SLOW}
    for _ in range(rounds):
        for name, seconds in quick.items():
            if sum(times[name]) * max(1, round(2e-3 / seconds)) < BUDGET:
                times[name].append(clock(ways[name], max(1, round(2e-3 / seconds)), device))
    return times


def cases(quick: bool) -> list[Case]:
    g = torch.Generator().manual_seed(3)
    tail = torch.randint(2, 16, (4095,), generator=g).tolist()
    found = [Case(f"{b} x {t}", [t] * b) for b, t in ((128, 5), (128, 50), (512, 50), (4096, 50))]
    found.append(Case("5-50 turns, 1,024", torch.randint(5, 51, (1024,), generator=g).tolist()))
    found.append(Case("4,095 of 2-15 and one of 5,000", [*tail, 5000]))
    if quick:
        return found
    found += [Case("1M turns: 20,000 x 50", [50] * 20_000), Case("1M turns in one trajectory", [1_000_000])]
    # Responses of 48 tokens, observations of 80, as in a chat with an environment.
    mask = (torch.arange(256 * 4096) % 128) < 48
    found.append(Case("1M tokens: 256 x 4,096, masked", [4096] * 256, mask))
    return found


def processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def rows_of(case: Case, device: str, rounds: int) -> list[dict[str, Any]]:
    case.to(device)
    ways = methods(case, device)
    if case.longest > 100_000:  # a loop over a million columns: minutes
        ways = {name: call for name, call in ways.items() if not name.endswith("loop") and not name.startswith("torchrl")}
    right = right_answer(case)
    errors = {name: error(case, call, right) for name, call in ways.items() if not name.startswith(("copy", "torchrl"))}
    times = measure(ways, device, rounds)
    if "torchrl vectorised" in ways and statistics.median(times["torchrl vectorised"]) < SLOW:
        errors["torchrl vectorised"] = error(case, ways["torchrl vectorised"], right)
    native = statistics.median(times["cuda" if device == "cuda" else "cpp"])
    copy = statistics.median(times["copy of the same bytes"])
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "case": case.name,
                "method": name,
                "trajectories": len(case.lengths),
                "turns": case.total,
                "longest": case.longest,
                "median_ms": f"{median * 1e3:.4g}",
                "least_ms": f"{min(seconds) * 1e3:.4g}",
                "rounds": len(seconds),
                "times_ours": f"{median / native:.3g}",
                "share_of_copy_bandwidth": f"{copy / median:.3g}",
                "max_error": f"{errors[name]:.2g}" if name in errors else "",
            }
        )
    return rows


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["case"] for row in rows))
    kinds = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 0.75 * len(names) + 2), layout="constrained")
    markers = dict(zip(kinds, "o.sD^v<>*", strict=False))
    for kind in kinds:
        points = [(float(row["median_ms"]), names.index(row["case"])) for row in rows if row["method"] == kind]
        axes.scatter(*zip(*points, strict=True), label=kind, marker=markers.get(kind, "x"), s=45)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a call, median")
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="without the cases of a million")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backends.select("turn_gae", "cuda" if options.device == "cuda" else "cpp", torch.device(options.device), torch.float32)

    load = os.getloadavg()[0]
    rows = []
    for case in cases(options.quick):
        for row in rows_of(case, options.device, options.rounds):
            print(
                f"{row['case']:<32} {row['method']:<24} {row['median_ms']:>9} ms {row['times_ours']:>8} x ours  error {row['max_error']}",
                flush=True,
            )
            rows.append(row)
    about = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(options.device),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch": torch.__version__,
        "load_before": f"{load:.1f}",
        "load_after": f"{os.getloadavg()[0]:.1f}",
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / ("gae_cuda.csv" if options.device == "cuda" else f"gae_cpu_t{options.threads}.csv")
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    title = f"GAE on {about['processor']}, {options.threads} threads, torch {torch.__version__}, load {about['load_before']}"
    plot(rows, target.with_suffix(".png"), title)
    print(target)


if __name__ == "__main__":
    main()
