"""Everything about the Triton row pass that only a GPU can show, in one run of under 8 minutes; results as CSV.

    python bench/gpu_check.py                       all checks, into bench/results/gpu_check.csv
    python bench/gpu_check.py --list                what they are
    python bench/gpu_check.py --only speed,graph

Exit status: 0 all held, 1 one did not, 2 there is no GPU. This script has been written without a GPU at hand and has not run on one yet.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # bench/kernels.py would stand in for a package of that name

import torch
from torch import Tensor

from sapo_fast import LossConfig, backends, fused_loss, row_pass, token_logprobs, triton_rows
from sapo_fast.loss_terms import Tokens

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_check.csv"
FIELDS = ("check", "case", "impl", "value", "unit", "limit", "held", "device", "torch")
IDS = (3, 4)
CONFIG = LossConfig(kl_coef=0.0, entropy_coef=0.001)
Row = tuple[str, str, float, str, str, bool]  # case, impl, value, unit, limit, held


def logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows with an entropy of about one nat, as a language model's have: a few tokens stand out."""
    g = torch.Generator("cuda").manual_seed(seed)
    z = torch.empty(rows, vocabulary, dtype=dtype, device="cuda")
    for lo in range(0, rows, 1024):  # in parts: torch.randn in float32 of all of it would not fit
        part = torch.randn(min(1024, rows - lo), vocabulary, generator=g, device="cuda")
        top = torch.randint(10, vocabulary, (len(part), 4), generator=g, device="cuda")
        z[lo : lo + len(part)] = part.scatter_add_(1, top, 14 + torch.rand(len(part), 4, generator=g, device="cuda") * 3).to(dtype)
    return z


def inputs(z: Tensor) -> tuple[Tensor, Tokens, Tensor]:
    n = z.shape[0]
    g = torch.Generator("cuda").manual_seed(1)
    actions = torch.where(
        torch.rand(n, generator=g, device="cuda") < 0.7, z.index_fill(1, torch.tensor(IDS, device="cuda"), -1e4).argmax(1), 11
    )
    advantages = torch.randn(n, generator=g, device="cuda")
    return actions, Tokens(None, advantages, None, None), torch.tensor(1 / n, dtype=torch.float64, device="cuda")


def milliseconds(calls: dict[str, Callable[[], Any]], repeats: int = 20) -> dict[str, float]:
    """Median of each, interleaved, after warm-ups, the L2 cache flushed before every call."""
    flush = torch.empty(128 * 2**20, dtype=torch.int8, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def copy_bandwidth() -> float:
    """GB/s, reads and writes counted."""
    source, target = (torch.empty(2**30, dtype=torch.int8, device="cuda") for _ in range(2))
    return 2 * 2**30 / milliseconds({"copy": lambda: target.copy_(source)})["copy"] / 1e6


def numbers() -> Iterator[Row]:
    """Against float64 at the launches that ship: every type, V divisible by 16 and not."""
    kernel, plain = triton_rows.TritonRows(), row_pass.TorchRows()
    for vocabulary in (1000, 4096, 16_384, 50_257, 151_936):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            z = logits(64, vocabulary, dtype)
            actions, tokens, scale = inputs(z)
            out, right = torch.empty_like(z), torch.empty_like(z, dtype=torch.float64)
            stats = kernel.loss_grad(z, None, actions, tokens, CONFIG, scale, IDS, out)
            wide = Tokens(*(None if x is None else x.double() for x in tokens))
            exact = row_pass.one_pass(plain, z.double(), None, actions, wide, CONFIG, scale, IDS, right, True)
            for name, found, target in (("logprob", stats.logprob, exact.logprob), ("gradient", out, right)):
                error = float((found.double() - target).abs().max() / target.abs().max())
                limit = 2e-6 + (torch.finfo(dtype).eps if name == "gradient" else 0)
                yield f"{name} V={vocabulary} {dtype}", "triton", error, "relative error", f"{limit:.2g}", error <= limit


def large() -> Iterator[Row]:
    """More than 2^31 and 2^32 entries: the last rows must be as right as the first, by rows and by strides."""
    for rows, vocabulary in ((16_384, 151_936), (30_000, 151_936)):
        need = rows * vocabulary * 2
        if torch.cuda.mem_get_info()[0] < need + 4 * 2**30:
            yield f"{rows} x {vocabulary}", "triton", need / 2**30, "GiB free needed", "not run", False
            continue
        z = logits(rows, vocabulary)
        last = torch.arange(rows - 8, rows, device="cuda")
        sample, action = z[last].clone(), torch.full((8,), 11, device="cuda")
        kernel = triton_rows.TritonRows()
        for form, view, at in (("row-major", z, last), ("transposed", z.view(vocabulary, rows).T, last)):
            picked = sample if form == "row-major" else view[last].contiguous()
            found, right = kernel.stats(view, at, action, IDS, 1.0), kernel.stats(picked, None, action, IDS, 1.0)
            same = all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
            yield f"{rows} x {vocabulary} {form}: statistics of the last rows", "triton", float(same), "same bits", "1", same
        tokens, scale = Tokens(None, torch.ones(8, device="cuda"), None, None), torch.ones((), dtype=torch.float64, device="cuda")
        right = torch.empty_like(sample)
        kernel.loss_grad(sample, None, action, tokens, CONFIG, scale, IDS, right)
        before = z[rows - 9].clone()
        kernel.loss_grad(z, last, action, tokens, CONFIG, scale, IDS, z)
        same = torch.equal(z[last], right) and torch.equal(z[rows - 9], before)
        yield (
            f"{rows} x {vocabulary}: gradient in place of the last rows, the row before untouched",
            "triton",
            float(same),
            "same bits",
            "1",
            same,
        )
        del z
        torch.cuda.empty_cache()


def races() -> Iterator[Row]:
    """The same call 300 times, in place and not: the same bits every time."""
    kernel = triton_rows.TritonRows()
    for vocabulary in (1024, 16_384, 49_152):
        z = logits(2048, vocabulary)
        actions, tokens, scale = inputs(z)
        right = torch.empty_like(z)
        first = kernel.loss_grad(z, None, actions, tokens, CONFIG, scale, IDS, right)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(300):
            out = z.clone() if i % 2 else torch.full_like(z, 7.0)
            stats = kernel.loss_grad(out if i % 2 else z, None, actions, tokens, CONFIG, scale, IDS, out)
            different += (out != right).any() | torch.stack([(x != y).any() for x, y in zip(stats, first, strict=True)]).any()
        yield f"2048 x {vocabulary}, 300 calls", "triton", float(different), "calls that differ", "0", int(different) == 0


def graph() -> Iterator[Row]:
    """A CUDA graph of the loss and its gradient, replayed on new numbers: nothing in the call waits for the device."""
    z = logits(256, 49_152)
    actions, tokens, _ = inputs(z)
    static = torch.empty_like(z).copy_(z).requires_grad_()
    arguments = {
        "value_token_ids": IDS, "action_rows": torch.arange(256, device="cuda"), "actions": actions, "old_logprobs": None,
        "advantages": tokens.advantages, "config": CONFIG, "impl": "triton", "check": False,
    }  # fmt: skip
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(fused_loss(logits=static, **arguments).loss, static)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = fused_loss(logits=static, **arguments).loss
        (gradient,) = torch.autograd.grad(loss, static)
    fresh = logits(256, 49_152, seed=9)
    with torch.no_grad():
        static.copy_(fresh)
    captured.replay()
    other = fresh.clone().requires_grad_()
    right = fused_loss(logits=other, **arguments).loss
    same = torch.equal(loss, right) and torch.equal(gradient, torch.autograd.grad(right, other)[0])
    yield "loss and gradient replayed", "triton", float(same), "same bits", "1", same


def compilations() -> Iterator[Row]:
    """Fifty numbers of rows and two offsets of the small inputs compile a kernel once."""
    from sapo_fast.kernels.row_loss import row_loss

    kernel = triton_rows.TritonRows()
    z = logits(200, 49_152)
    actions, tokens, scale = inputs(z)
    counts = []
    for n in range(2, 52):
        part = Tokens(*(None if x is None else x[1 : n + 1] for x in tokens))
        kernel.loss_grad(z[:n], None, actions[1 : n + 1], part, CONFIG, scale, IDS, torch.empty_like(z[:n]))
        counts.append(sum(len(cache[0]) for cache in row_loss.device_caches.values()))
    yield "compilations after the first of 50 calls", "triton", counts[-1] - counts[0], "kernels", "0", counts[-1] == counts[0]


def speed() -> Iterator[Row]:
    """Milliseconds and share of the copy bandwidth: plain torch, torch.compile and the kernels; then launches the table does not use."""
    bandwidth = copy_bandwidth()
    yield "copy of 1 GiB", "torch", bandwidth, "GB/s", "", True

    def eager(z: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(z.float().index_fill(1, torch.tensor(IDS, device="cuda"), -torch.inf), 1)
        return log_q.gather(1, actions[:, None])[:, 0], -(log_q.exp() * log_q.clamp(min=-1e4)).sum(1)

    compiled = torch.compile(eager)
    for rows, vocabulary in ((512, 151_936), (4096, 49_152), (4096, 151_936)):
        z = logits(rows, vocabulary)
        actions, tokens, scale = inputs(z)
        out, every = torch.empty_like(z), torch.arange(rows, device="cuda")
        size = z.numel() * z.element_size()
        at = {"value_token_ids": IDS, "action_rows": every, "actions": actions, "check": False}

        def both(fn: Callable[..., Any], leaf: Tensor, actions: Tensor = actions) -> None:
            logprob, entropy = fn(leaf, actions)
            torch.autograd.grad(logprob.sum() + entropy.sum(), leaf)

        leaf = z.clone().requires_grad_()
        kernel = triton_rows.TritonRows()
        calls: dict[str, tuple[int, Callable[[], Any]]] = {
            "eager: forward": (1, lambda z=z, actions=actions: eager(z, actions)),
            "torch.compile: forward": (1, lambda z=z, actions=actions: compiled(z, actions)),
            "triton: statistics": (1, lambda z=z, at=at: token_logprobs(logits=z, **at, impl="triton")),
            "eager: forward and backward": (2, lambda leaf=leaf: both(eager, leaf)),
            "torch.compile: forward and backward": (2, lambda leaf=leaf: both(compiled, leaf)),
            "triton: loss and gradient": (
                2, lambda z=z, a=actions, t=tokens, s=scale, o=out, k=kernel: k.loss_grad(z, None, a, t, CONFIG, s, IDS, o)),
        }  # fmt: skip
        for name, took in milliseconds({name: call for name, (_, call) in calls.items()}).items():
            floor = calls[name][0] * size / bandwidth / 1e6
            impl = name.split(":")[0]
            yield f"{rows} x {vocabulary} {name}", impl, took, "ms", "", True
            yield f"{rows} x {vocabulary} {name}", impl, 100 * floor / took, "% of one read (and one write)", "", True
        del leaf
        kept = triton_rows.LAUNCHES
        try:
            for block in (2048, 4096, 8192, 16_384):
                for warps in (4, 8, 16):
                    if block < 256 * warps:
                        continue
                    triton_rows.LAUNCHES = [(None, block, warps)]
                    call = calls["triton: loss and gradient"][1], calls["triton: statistics"][1]
                    took = milliseconds({"gradient": call[0], "statistics": call[1]}, repeats=7)
                    for name, value in took.items():
                        yield f"{rows} x {vocabulary} {name} BLOCK={block} warps={warps}", "triton", value, "ms", "", True
        finally:
            triton_rows.LAUNCHES = kept
        del z, out
        torch.cuda.empty_cache()


CHECKS = {f.__name__: f for f in (numbers, large, races, graph, compilations, speed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--only", default=",".join(CHECKS), help="comma-separated, default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.list:
        for name, check in CHECKS.items():
            print(f"{name:14s}{check.__doc__}")
        return 0
    chosen = args.only.split(",")
    for name in chosen:
        if name not in CHECKS:
            parser.error(f"--only: {name!r} is none of {', '.join(CHECKS)}")
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU, so nothing was checked", file=sys.stderr)
        return 2
    backends.select("row_pass", "triton", torch.device("cuda"), torch.bfloat16)
    device, failed, lines = torch.cuda.get_device_name(), 0, []
    for name in chosen:
        began = time.perf_counter()
        try:
            for case, impl, value, unit, limit, held in CHECKS[name]():
                lines.append((name, case, impl, f"{value:.6g}", unit, limit, held, device, torch.__version__))
                failed += not held
                print(f"{'ok  ' if held else 'FAIL'} {name}: {case}: {value:.6g} {unit} {limit}", flush=True)
        except Exception as error:  # the other checks still tell something
            failed += 1
            lines.append((name, f"{type(error).__name__}: {error}", "triton", "nan", "", "", False, device, torch.__version__))
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        csv.writer(file).writerows([FIELDS, *lines])
    print(f"{len(lines)} lines in {args.out}, {failed} did not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
