"""Random calls of the Triton row pass and of the public operations through it, each compared with float64 and with plain torch.

As a program, a fuzz of any length: ``python tests/helpers_triton.py 10000`` (seeds 0, 1, ...; a second number is the first seed).
"""

from __future__ import annotations

import sys
import time
from typing import Any

import conftest  # noqa: F401  (as a program: the interpreter is set up before sapo_fast is imported)
import torch
from helpers_ops import HALF_FLOOR, WIDE, as_logits, cast, problem, run, up
from torch import Tensor

from sapo_fast import LossConfig, fused_loss, reference, token_logprobs, triton_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (longest row, block, warps) as triton_rows.LAUNCHES: rows of a few tens of logits go through every loop.
SMALL = {
    "one read": [(16, 16, 1), (64, 64, 1), (512, 512, 1)],
    "16 at a time": [(None, 16, 1)],
    "64 at a time": [(None, 64, 1)],
}


def to_device(p: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in p.items()}


def restrided(x: Tensor, kind: str) -> Tensor:
    """The same matrix behind unusual strides, with not-a-number in every gap."""
    if kind == "padded":
        wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype, device=x.device)
        wide[:, 2:-3] = x
        return wide[:, 2:-3]
    if kind == "transposed":
        return x.T.contiguous().T
    if kind == "every other":
        wide = torch.full((2 * x.shape[0] + 1, 2 * x.shape[1] + 1), torch.nan, dtype=x.dtype, device=x.device)
        wide[1::2, 1::2] = x
        return wide[1::2, 1::2]
    return x


def assert_as_good(found: dict[str, Tensor], plain: dict[str, Tensor], right: dict[str, Tensor], unit: float) -> None:
    """Error at most 3 times plain torch's plus a floor. ``unit``: the rounding of the type.

    Errors are counted in the largest entry; those of the loss and the metrics, sums in which terms of about 1 may cancel, in that or 1. A
    log-probability of -30 is rounded to 2e-6, which goes into every ratio: the floor grows with it. Readouts are not the row pass' work.
    """
    assert set(found) == set(right)
    floor = 16 * unit * max(1.0, float(right["logprobs"].abs().max()) / 4)
    for name, target in right.items():
        if name.removeprefix("metric ").startswith(("v", "q")):
            continue
        if "fraction" in name or target.numel() == 0:  # decisions at a clip may turn over in half precision
            assert found[name].shape == target.shape
            continue
        assert torch.isfinite(found[name]).all(), name
        scalar = name == "loss" or name.startswith("metric ")
        size = max(float(target.abs().max()), 1.0 if scalar else 1e-6)
        least = floor + 2.0**-23 / size if found[name].dtype == torch.float16 else floor  # two of its smallest steps
        ours, theirs = (float((x[name].double() - target.double()).abs().max()) / size for x in (found, plain))
        assert ours <= 3 * theirs + least, f"{name}: error {ours:.3g}, plain torch {theirs:.3g}, floor {least:.3g}"


def token_run(fn: Any, p: dict[str, Any], up_logprob: Tensor, up_entropy: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    """token_logprobs and its gradients."""
    leaves = {k: p[k].detach().clone().requires_grad_() for k in WIDE if p.get(k) is not None}
    rest = {k: p[k] for k in ("value_token_ids", "action_rows", "actions")}
    logprob, entropy = fn(**leaves, **rest, **kwargs)
    total = (logprob * up_logprob.to(logprob.dtype)).sum() + (entropy * up_entropy.to(entropy.dtype)).sum()
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"logprobs": logprob.detach(), "entropy": entropy.detach()} | {f"d_{k}": g for k, g in zip(leaves, grads, strict=True)}


def _draw_logits(z: Tensor, p: dict[str, Any], draw: Any) -> Tensor:
    """One of the kinds of rows that break kernels."""
    T, V = z.shape
    kind = draw("plain", "plain", "shifted", "spike", "on the action", "banned", "one token left", "huge value tokens", "flat", "lowest")
    allowed = torch.ones(V, dtype=torch.bool)
    allowed[list(p["value_token_ids"])] = False
    if kind == "shifted":
        z = z + draw(-300.0, 300.0) * torch.rand(T, 1, dtype=z.dtype)
    elif kind == "spike":
        z = z.scatter_add(1, torch.randint(0, V, (T, 1)), torch.full((T, 1), 40.0, dtype=z.dtype))
    elif kind == "on the action":
        z[p["action_rows"], p["actions"]] = z.max() + 60
    elif kind in ("banned", "lowest"):
        banned = (torch.rand(T, V) < 0.8) & allowed
        banned[p["action_rows"], p["actions"]] = False
        z = z.masked_fill(banned, -torch.inf if kind == "banned" else -6e4)
    elif kind == "one token left":
        keep = torch.zeros(T, V, dtype=torch.bool)
        keep[p["action_rows"], p["actions"]] = True
        z = z.masked_fill(~keep & allowed, -torch.inf)
    elif kind == "huge value tokens":
        z[:, ~allowed] += 200
    elif kind == "flat":
        z = torch.zeros_like(z)
    return z


def check_one(seed: int) -> None:
    """One random call: sizes, types, strides, settings, launches, repeats and extremes drawn together."""
    torch.manual_seed(seed)

    def draw(*choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,)))]

    V, T, N = draw(3, 4, 15, 16, 17, 31, 33, 64, 65, 127), draw(1, 2, 6), draw(1, 1, 2, 3)
    launches = draw(*SMALL.values())
    dtype, form = draw(*DTYPES), draw("logits", "logits", "hidden")
    p = problem(seed, T=T, N=N, M=draw(0, 1, 3), V=V, H=draw(1, 3, 8), scale=draw(0.1, 1.0, 4.0), bias=draw(True, False))
    if draw(True, False):  # by either end, or side by side
        plus, minus = draw((0, V - 1), (V - 1, 0), (0, 1), (V - 1, V - 2), (V // 2, V // 2 - 1))
        p["value_token_ids"] = (plus, minus)
        p["actions"] = torch.tensor([j for j in range(V) if j not in (plus, minus)])[torch.randint(0, V - 2, (N,))]
    if form == "logits":
        p = as_logits(p)
        p["logits"] = _draw_logits(p["logits"], p, draw)
    temperature = draw(0.4, 1.0, 1.0, 1.7)
    p = cast(p, dtype)
    wide = {k: v for k, v in up(p).items() if k in (*WIDE, "value_token_ids", "action_rows", "actions")}
    logprob, _ = reference.token_logprobs(**wide, temperature=temperature)
    for k in ("old_logprobs", "ref_logprobs", "token_weights"):
        if draw(True, False):
            p[k] = None
        elif k != "token_weights":  # exp(20) would drown everything in half precision: far ratios are a test of their own
            p[k] = -(logprob + 0.4 * torch.randn(N, dtype=torch.float64)).abs().float()
    config = LossConfig(
        clip_low=draw(None, 0.1, 0.2), clip_high=draw(None, 0.28), dual_clip=draw(None, 3.0), v_clip=draw(None, 0.2), v_coef=draw(0.0, 0.5),
        kl_coef=0.1 if p["ref_logprobs"] is not None else 0.0, entropy_coef=draw(0.0, 0.01), temperature=temperature,
    )  # fmt: skip
    inplace = form == "logits" and draw(True, False)
    strides = draw("plain", "padded", "transposed", "every other") if form == "logits" and not inplace else "plain"
    p = to_device(p)
    given = {**p, "logits": restrided(p["logits"], strides)} if form == "logits" else p
    kept, triton_rows.LAUNCHES = triton_rows.LAUNCHES, launches
    try:
        if draw("loss", "loss", "tokens") == "tokens":
            weights = {"up_logprob": torch.randn(N, device=DEVICE), "up_entropy": torch.randn(N, device=DEVICE)}
            weights["temperature"] = temperature
            right = token_run(reference.token_logprobs, up(p), **weights)
            plain, found = token_run(reference.token_logprobs, p, **weights), token_run(token_logprobs, given, **weights, impl="triton")
        else:
            right = run(reference.fused_loss, up(p), config=config)
            plain = run(reference.fused_loss, p, config=config)
            found = run(_in_place if inplace else fused_loss, given, config=config, impl="triton")
    finally:
        triton_rows.LAUNCHES = kept
    try:
        assert_as_good(found, plain, right, HALF_FLOOR[dtype])
    except AssertionError as error:
        raise AssertionError(
            f"seed {seed}: {error} ({form}, {dtype}, V={V}, T={T}, N={N}, {strides}, in place {inplace}, {config})"
        ) from None


def _in_place(logits: Tensor, **kwargs: Any) -> Any:
    return fused_loss(logits=logits * 1.0, **kwargs, inplace=True)


def row_inputs(seed: int, *, n: int = 5, T: int = 7, V: int = 37, ids: tuple[int, int] = (3, 20), dtype: torch.dtype = torch.float32):
    """(logits [T, V], rows [n] distinct, actions [n], a [n], b [n])"""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(T, V, generator=g) * 3
    allowed = torch.tensor([j for j in range(V) if j not in ids])
    rows, actions = torch.randperm(T, generator=g)[:n], allowed[torch.randint(0, len(allowed), (n,), generator=g)]
    a, b = torch.randn(n, generator=g), torch.randn(n, generator=g)
    return tuple(x.to(DEVICE) for x in (z.to(dtype), rows, actions, a, b))


if __name__ == "__main__":
    torch.set_num_threads(1)
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began, failures = time.time(), 0
    for seed in range(first, first + count):
        try:
            check_one(seed)
        except Exception as error:
            failures += 1
            print(f"{type(error).__name__} at seed {seed}: {error}", flush=True)
        if (seed - first + 1) % 500 == 0:
            print(f"{seed - first + 1} calls, {failures} failures, {time.time() - began:.0f} s", flush=True)
    print(f"{count} calls on {DEVICE}, {failures} failures, {time.time() - began:.0f} s")
    sys.exit(failures > 0)
