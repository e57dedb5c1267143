"""Random segmentations through `turn_gae`, every backend that runs here, against the definition in float64.

    python tests/heavy/fuzz_gae.py [--problems 10000] [--seed 0]

Of each backend: the largest error, next to that of the same recursion done step by step in float32, problem by problem; exit status 1 where a
backend's is more than three times as large (or beyond one rounding, where float32 was lucky). Every tenth problem runs again on other numbers of
threads: the bits must be the same. Lengths are 0 to 50; in one problem of 500 also 100,000. The CUDA kernels are fuzzed without a GPU by
`build/tests/cuda_gae_emulated 10000` (docs/native.md).
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import numpy as np
import torch

from sapo_fast import backends, turn_gae

ROUNDING = 2.0**-23  # of the largest entry: half a unit of float32, and as much for the comparison


def available() -> list[tuple[str, str]]:
    """(backend, device) of all that run here."""
    lines = [x for x in backends.explain() if x.operation == "turn_gae" and x.available]
    return [(x.backend, "cuda" if x.backend == "cuda" else "cpu") for x in lines]


def definition(arrays: tuple[np.ndarray, ...], cu: list[int], gamma: float, lam: float, lam_v: float, real: type) -> np.ndarray:
    """Advantages, V and Q targets, [3, T]: delta and A turn by turn, every operation in ``real``."""
    r, v, q, after = (x.astype(real) for x in arrays)
    gamma, carry, carry_v = real(gamma), real(real(gamma) * real(lam)), real(real(gamma) * real(lam_v))
    out = np.zeros((3, len(r)), dtype=real)
    for b in range(len(cu) - 1):
        next_v = next_q = after[b]
        a = a_v = real(0)
        for t in range(cu[b + 1] - 1, cu[b] - 1, -1):
            delta = r[t] + gamma * next_v - v[t]
            a, a_v = delta + carry * a, delta + carry_v * a_v
            out[:, t] = a, v[t] + a_v, r[t] + gamma * next_q
            next_v, next_q = v[t], q[t]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, g = random.Random(options.seed), torch.Generator().manual_seed(options.seed)
    ways = available()
    worst = {name: 0.0 for name, _ in ways}  # error / what is allowed
    largest = {name: 0.0 for name, _ in ways}
    plain_largest, turns, repeated, failures = 0.0, 0, 0, 0
    threads, start = torch.get_num_threads(), time.perf_counter()
    for problem in range(options.problems):
        lengths = [rng.choice([0, 1, 2, 3, rng.randint(0, 50)]) for _ in range(rng.randint(0, 12))]
        if problem % 500 == 499:
            lengths = [*lengths, 0, 100_000, 7, *(rng.randint(0, 50) for _ in range(1000))]
            rng.shuffle(lengths)
        cu = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)])
        total = int(cu[-1])
        r, v, q = rng.choice([1.0, 1e-3, 1e3]) * torch.randn(3, total, generator=g) + rng.choice([0.0, 0.0, 5.0])
        after = torch.randn(len(lengths), generator=g)
        gamma, lam = rng.choice([0.95, 0.99, 1.0, 0.0]), rng.choice([0.95, 1.0, 0.9, 0.0])
        lam_v = rng.choice([lam, 1.0, 0.5])
        arrays = tuple(x.numpy() for x in (r, v, q, after))
        right, plain = (definition(arrays, cu.tolist(), gamma, lam, lam_v, real) for real in (np.float64, np.float32))
        scale = float(np.abs(right).max(initial=0.0))
        plain_error = float(np.abs(plain - right).max(initial=0.0))
        plain_largest, turns = max(plain_largest, plain_error / (scale or 1.0)), turns + total
        for name, device in ways:
            given = [x.to(device) for x in (r, v, q)]
            rest = {"cu_turns": cu.to(device), "bootstrap": after.to(device), "gamma": gamma, "lam": lam, "lam_v": lam_v, "impl": name}
            found = torch.stack(turn_gae(*given, **rest))
            error = float(np.abs(found.double().cpu().numpy() - right).max(initial=0.0))
            largest[name] = max(largest[name], error / (scale or 1.0))
            allowed = max(3 * plain_error, ROUNDING * scale)
            if not error <= allowed:
                failures += 1
                print(
                    f"problem {problem}, {name}: error {error:.3g}, float32 {plain_error:.3g} (lengths {lengths}, gamma {gamma}, lam {lam}, {lam_v})"
                )
            worst[name] = max(worst[name], error / allowed if allowed else 0.0)
            if problem % 10 == 0 or total > 50_000:
                repeated += 1
                for other in (1, 2, 3, 7):
                    torch.set_num_threads(other)
                    if not torch.equal(torch.stack(turn_gae(*given, **rest)), found):
                        failures += 1
                        print(f"problem {problem}, {name}: other bits with {other} threads")
                torch.set_num_threads(threads)
    print(
        f"{options.problems} problems, {turns} turns, seed {options.seed}, {time.perf_counter() - start:.0f} s; errors relative to the largest entry"
    )
    print(f"float32, step by step   largest error {plain_largest:.2g}")
    for name, _ in ways:
        print(f"{name:<6}                  largest error {largest[name]:.2g}, {worst[name]:.2f} of what is allowed")
    print(f"{repeated} calls repeated on 1, 2, 3 and 7 threads: {'the same bits' if not failures else 'see above'}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
