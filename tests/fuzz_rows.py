"""Random calls of the loss and the log-probabilities against the float64 reference: error at most 3 times plain torch's in the same type, plus a floor.

One run of plain torch can be lucky. So its error is taken as no less than what the exact result moves by when logits, hidden states and head move by
one unit in the last place of float32: what any float32 arithmetic may do.

    python tests/fuzz_rows.py [--calls 10000] [--impl cpp] [--start 0]     figures at the end

A call draws a shape, a type, a layout, a form, settings, masks, and one of the kinds below (the ways in which such kernels have gone wrong elsewhere).

Legend: T rows, N action tokens, M turns, V vocabulary, H hidden size.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from helpers_ops import HALF_FLOOR, WIDE, as_logits, cast, error, problem, run, up
from torch import Tensor

from sapo_fast import LossConfig, fused_loss, reference, token_logprobs

KINDS = (
    "plain", "masked logits", "only one finite block", "peaked", "all equal", "shifted", "huge spread", "far tokens", "no tokens", "one token",
    "value tokens first", "value tokens last", "value tokens apart", "likely value tokens", "every row repeats", "action and value row",
    "junk in unused rows", "tiny weights", "no advantages",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "padded", "every other row", "offset")


def settings(r: random.Random) -> LossConfig:
    def maybe(*choices: float) -> float | None:
        return r.choice((None, *choices))

    return LossConfig(
        clip_low=maybe(0.1, 0.2), clip_high=maybe(0.2, 0.3), dual_clip=maybe(1.2, 3.0), v_clip=maybe(0.2), q_clip=maybe(0.1),
        kl_coef=r.choice((0.0, 0.01, 0.3)), entropy_coef=r.choice((0.0, 0.001, 0.1)), temperature=r.choice((1.0, 1.0, 0.7, 1.5)),
        tau_v=r.choice((1.0, 0.3)), readout=r.choice(("linear", "clip")),
    )  # fmt: skip


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another layout, rows still contiguous; what lies between is NaN."""
    rows, columns = x.shape
    if layout == "padded":
        space = torch.full((rows, columns + 7), torch.nan, dtype=x.dtype)
        space[:, :columns] = x
        return space[:, :columns]
    if layout == "every other row":
        space = torch.full((2 * rows + 1, columns), torch.nan, dtype=x.dtype)
        space[1::2] = x
        return space[1::2]
    if layout == "offset":  # addresses that are multiples of nothing
        space = torch.full((rows * columns + 1,), torch.nan, dtype=x.dtype)
        space[1:] = x.flatten()
        return space[1:].view(rows, columns)
    return x


def make(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(problem in its type, what was drawn)."""
    r = random.Random(seed)
    kind, dtype, form = KINDS[seed % len(KINDS)], r.choice(DTYPES), r.choice(("hidden", "logits", "logits", "logits in place"))
    V = r.choice((3, 4, 15, 16, 17, 31, 33, 64, 65, 257, 1000, 4097, 9001))
    T = r.choice((1, 2, 7, 20))
    N = 0 if kind == "no tokens" else 1 if kind == "one token" else r.choice((1, 3, T, 2 * T, 30))
    p = problem(seed, T=T, N=N, M=r.choice((1, 4)), V=V, H=r.choice((1, 5, 24)), scale=r.choice((0.2, 1.0)), bias=r.random() < 0.5)
    config = settings(r)
    plus, minus = p["value_token_ids"]
    if kind.startswith("value tokens"):
        plus, minus = {"first": (0, 1), "last": (V - 1, V - 2), "apart": (V - 1, 0)}[kind.split()[-1]]
        p["value_token_ids"] = (plus, minus)
        p["actions"] = torch.tensor([i for i in range(V) if i not in (plus, minus)])[p["actions"] % (V - 2)]
    if kind == "every row repeats":
        p["action_rows"] = torch.arange(N) % max(1, T // 2)
        p["actions"][: N // 2] = p["actions"][:1]
    if kind == "action and value row" and N:
        p["v_rows"] = p["action_rows"][: len(p["v_rows"])].clone()
        p["v_old"], p["v_targets"] = p["v_old"][: len(p["v_rows"])], p["v_targets"][: len(p["v_rows"])]
    if form != "hidden":
        p = as_logits(p)
        z = p["logits"]
        others = torch.tensor([i for i in range(V) if i not in (plus, minus)])
        taken = (p["action_rows"], p["actions"])
        if kind == "masked logits":
            kept = z[taken]
            z[:, others] = z[:, others].masked_fill(
                torch.rand(T, len(others), generator=torch.Generator().manual_seed(seed)) < 0.6, -torch.inf
            )
            z[taken] = kept
        elif kind == "only one finite block":
            kept = z[taken]
            z[:, others[: len(others) * 2 // 3]] = -torch.inf
            z[taken] = kept
        elif kind == "peaked" and N:
            z[taken] += 60.0
        elif kind == "all equal":
            z.fill_(1.25)
        elif kind == "shifted":
            z += r.choice((-300.0, 300.0))
        elif kind == "huge spread":
            z *= 100
        elif kind == "far tokens" and N:
            z[taken] -= 90.0
        elif kind == "likely value tokens":
            z[:, plus] += 80.0
            z[:, minus] += 79.0
        elif kind == "junk in unused rows":
            used = torch.zeros(T, dtype=torch.bool)
            for name in ("action_rows", "v_rows", "q_rows"):
                used[p[name]] = True
            z[~used] = torch.nan
    if kind == "tiny weights":
        p["token_weights"] = p["token_weights"] * 1e-6
    if kind == "no advantages":
        p["advantages"] = p["advantages"] * 0
    if r.random() < 0.3:
        p["token_weights"] = None
    p = cast(p, dtype)
    # Per-token inputs near the log-probabilities these very logits give, on both sides of every clip.
    with torch.no_grad():
        wide = {k: v for k, v in up(p).items() if k in (*WIDE, "value_token_ids", "action_rows", "actions") and v is not None}
        logprob, _ = reference.token_logprobs(**wide, temperature=config.temperature)
    g = torch.Generator().manual_seed(seed)
    for name in ("old_logprobs", "ref_logprobs"):
        p[name] = (logprob + 0.4 * torch.randn(N, generator=g, dtype=torch.float64)).clamp(max=0).float()
    if r.random() < 0.2:
        p["old_logprobs"] = None
    p["config"] = config
    return p, {"kind": kind, "dtype": dtype, "form": form, "layout": r.choice(LAYOUTS), "only": r.random() < 0.2, "seed": seed}


def _loss(p: dict[str, Any], impl: str | None, inplace: bool, layout: str) -> dict[str, Tensor]:
    if impl is None:
        return run(reference.fused_loss, p)

    def call(**q: Any) -> Any:
        if "logits" in q:
            q["logits"] = _View.apply(q["logits"], layout)
        return fused_loss(**q, impl=impl, inplace=inplace)

    return run(call, p)


class _View(torch.autograd.Function):
    """Another layout, with the gradient back in the old one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: str) -> Tensor:
        out = _laid_out(x.clone(), layout)
        # The same memory as a tensor that is nobody's view, so that it may be written in place.
        return torch.empty(0, dtype=x.dtype).set_(out.untyped_storage(), out.storage_offset(), out.shape, out.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clone(), None


def _logprobs(p: dict[str, Any], impl: str | None, layout: str) -> dict[str, Tensor]:
    few = {k: p[k] for k in (*WIDE, "value_token_ids", "action_rows", "actions") if p.get(k) is not None}
    leaves = {k: v.detach().clone().requires_grad_() for k, v in few.items() if k in WIDE}
    given = {**few, **leaves}
    temperature = p["config"].temperature
    if impl is None:
        logprob, entropy = reference.token_logprobs(**given, temperature=temperature)
    else:
        if "logits" in given:
            given["logits"] = _View.apply(given["logits"], layout)
        logprob, entropy = token_logprobs(**given, temperature=temperature, impl=impl)
    weights = torch.linspace(-1, 1, logprob.shape[0], dtype=logprob.dtype)
    total = (logprob.nan_to_num(neginf=0.0) * weights).sum() + 0.3 * entropy.sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"logprobs": logprob.detach(), "entropy": entropy.detach()} | {f"d_{k}": g for k, g in zip(leaves, grads, strict=True)}


def _nudged(p: dict[str, Any], seed: int) -> dict[str, Any]:
    """The problem in float64, its wide tensors moved by at most a unit in the last place of float32."""
    g = torch.Generator().manual_seed(seed)
    q = up(p)
    for name in WIDE:
        if q.get(name) is not None:
            q[name] = q[name] * (1 + 2.0**-23 * (2 * torch.rand(q[name].shape, generator=g, dtype=torch.float64) - 1))
    return q


def check_call(seed: int, impl: str) -> float:
    """One call. Returns its worst error over what was allowed; AssertionError where that is above 1."""
    p, drawn = make(seed)
    layout, form = drawn["layout"], drawn["form"]
    if drawn["only"]:
        found, plain, right, *near = (
            _logprobs(q, way, layout) for q, way in ((p, impl), (p, None), (up(p), None), *((_nudged(p, i), None) for i in range(3)))
        )
    else:
        inplace = form == "logits in place"
        found, plain, right, *near = (
            _loss(q, way, inplace, layout) for q, way in ((p, impl), (p, None), (up(p), None), *((_nudged(p, i), None) for i in range(3)))
        )
    # A log-probability of -90 is a float32 with steps of 7.6e-6, and everything else is made of its exp().
    largest = float(right["logprobs"].abs().max()) if len(p["actions"]) else 0.0
    floor, worst = 4 * HALF_FLOOR[drawn["dtype"]] + 4 * 2.0**-24 * largest, 0.0
    for name in right:
        if name.startswith("metric "):  # sums of what is compared already, and counts of decisions that rounding turns over
            continue
        assert found[name].shape == right[name].shape, (name, drawn)
        ours, theirs = error(found[name], right[name]), error(plain[name], right[name])
        theirs = max([theirs, *(x for x in (error(other[name], right[name]) for other in near) if x == x)])
        if theirs != theirs:  # plain torch itself has no answer
            theirs = 1.0
        allowed = 3 * theirs + floor
        if name == "loss":  # terms of both signs: their own size counts, not that of what is left of them
            terms = sum(abs(float(right[f"metric {term}_loss"])) for term in ("policy", "v", "q") if f"metric {term}_loss" in right)
            allowed += floor * terms / max(abs(float(right[name])), 1e-30)
        assert ours <= allowed, f"{name}: error {ours:.3g}, plain torch {theirs:.3g}, floor {floor:.3g}: {drawn}"
        worst = max(worst, ours / allowed)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--impl", default="cpp")
    options = parser.parse_args()
    began, wrong, worst = time.perf_counter(), 0, 0.0
    for seed in range(options.start, options.start + options.calls):
        try:
            worst = max(worst, check_call(seed, options.impl))
        except AssertionError as story:
            wrong += 1
            print(f"seed {seed}: {story}", flush=True)
    print(
        f"impl={options.impl}: {options.calls} calls of {len(KINDS)} kinds, {wrong} wrong, largest error {worst:.2f} of what is allowed, "
        f"{time.perf_counter() - began:.0f} s"
    )
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
