"""The loss over the vocabulary: ours against eager torch, torch.compile and the kernels of other trainers.

    python bench/kernels.py [--device cpu|cuda] [--threads N] [--quick] [--dtype float32|bfloat16] [--forms hidden logits] [--out bench/results]

Writes kernels_cpu_t<threads>_<dtype>.csv or kernels_cuda_<dtype>.csv, and plots beside it. Cases: T rows x share of action rows x hidden size x
vocabulary. Timed are the forward, the backward and both; medians of interleaved rounds. Each method computes log-probabilities, entropy, PPO with both
clips and the two value losses, and every gradient; methods "as shipped" take all T rows, as trainers call them, the others the action rows alone.
Peers written here follow their published definitions (TRL's chunked log-probs, verl's fused form for PPO); packages are used where installed,
and named with the reason where not.

Columns: median_ms; times_ours (median over ours); share_of_floor (hidden: 6 N V H over the rate of this machine's own matrix product; logits: the time
of copying the action rows); peak_mb (most memory alive above the inputs, gradients included); max_error (gradients and loss against float64,
relative to the largest entry, on a small problem).

Legend: T rows, N action tokens, M turns, V vocabulary, H hidden size.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This file's folder holds kernels.py, which would be found in the place of a package of that name.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from sapo_fast import LossConfig, backends, fused_loss, reference  # noqa: E402

CONFIG = LossConfig(kl_coef=0.0, entropy_coef=0.001)
BUDGET = 20.0  # seconds a method may take in a case, after its first call
Problem = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------------- problems


def make(form: str, T: int, share: float, H: int, V: int, dtype: torch.dtype, device: str) -> Problem:
    """Logits of about one nat of entropy, from hidden states and a head or as they are; one turn in 40 rows."""
    g = torch.Generator().manual_seed(T + V)
    n, turns = max(1, round(T * share)), max(1, T // 40)
    rows = torch.randperm(T, generator=g)[:n].sort().values
    hidden = torch.randn(T, H, generator=g).mul_(4.0 / H**0.5)
    head = torch.randn(V, H, generator=g)
    actions = torch.randint(0, V - 2, (n,), generator=g)
    p: Problem = {
        "value_token_ids": (V - 2, V - 1), "action_rows": rows, "actions": actions,
        "old_logprobs": -torch.rand(n, generator=g) * 12, "advantages": torch.randn(n, generator=g),
    }  # fmt: skip
    for kind in "vq":
        at = torch.randint(0, T, (turns,), generator=g)
        p |= {f"{kind}_rows": at, f"{kind}_old": torch.randn(turns, generator=g), f"{kind}_targets": torch.randn(turns, generator=g)}
    p |= {"hidden": hidden.to(dtype), "lm_head": head.to(dtype)}
    if form == "logits":
        p["logits"] = p.pop("hidden") @ p.pop("lm_head").T
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in p.items()}


def compacted(p: Problem) -> Problem:
    """The same with the action and value rows alone, renumbered: what a peer that takes every row is given to be compared fairly."""
    kept = torch.cat([p["action_rows"], p["v_rows"], p["q_rows"]]).unique()
    key = "logits" if "logits" in p else "hidden"
    found = {k: torch.searchsorted(kept, v) if k.endswith("_rows") else v for k, v in p.items()}
    return found | {key: p[key][kept]}


def leaves(p: Problem) -> list[str]:
    return [k for k in ("logits", "hidden", "lm_head") if k in p]


# ------------------------------------------------------------------------------------------------------------------ methods


def rest_of_loss(logprob: Tensor, entropy: Tensor, values: dict[str, Tensor], p: Problem) -> Tensor:
    """Everything after the vocabulary, in torch."""
    policy = reference.policy_loss(logprob, p["old_logprobs"], p["advantages"], CONFIG.clip_low, CONFIG.clip_high, CONFIG.dual_clip)
    loss = policy.mean() - CONFIG.entropy_coef * entropy.mean()
    for kind, coef in (("v", CONFIG.v_coef), ("q", CONFIG.q_coef)):
        old, target = p[f"{kind}_old"] / CONFIG.r_max, p[f"{kind}_targets"] / CONFIG.r_max
        loss = loss + coef * reference.value_loss(values[kind], old, target, CONFIG.v_clip).mean()
    return loss


def read(z: Tensor, p: Problem) -> dict[str, Tensor]:
    plus, minus = p["value_token_ids"]
    return {kind: z[p[f"{kind}_rows"], plus].float() - z[p[f"{kind}_rows"], minus].float() for kind in "vq"}


def eager(p: Problem) -> Tensor:
    """log_softmax, gather, entropy and autograd on the action rows: sapo_fast/reference.py."""
    return reference.fused_loss(**p, config=CONFIG).loss


def eager_all_rows(p: Problem) -> Tensor:
    """What trainers do: log_softmax of every row of the batch, then a mask."""
    z = p["logits"] if "logits" in p else torch.nn.functional.linear(p["hidden"], p["lm_head"])
    log_q = reference.masked_log_softmax(z, p["value_token_ids"])
    at, act = p["action_rows"], p["actions"]
    entropy = reference.entropy(log_q)
    return rest_of_loss(log_q[at, act], entropy[at], read(z, p), p)


class _ChunkedLogProbs(torch.autograd.Function):
    """TRL 1.16's ChunkedLogProbFunction in torch: rows by tiles, the logits made again in the backward (four matrix products), float32 sums."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, actions: Tensor, banned: tuple[int, int], rows: int) -> tuple[Tensor, Tensor]:
        found = [_ChunkedLogProbs.tile(h, head, a, banned)[1:3] for h, a in zip(hidden.split(rows), actions.split(rows), strict=True)]
        ctx.save_for_backward(hidden, head, actions)
        ctx.banned, ctx.rows = banned, rows
        return torch.cat([x[0] for x in found]), torch.cat([x[1] for x in found])

    @staticmethod
    def tile(h: Tensor, head: Tensor, actions: Tensor, banned: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.nn.functional.linear(h, head).float()
        z[:, list(banned)] = -torch.inf
        log_q = torch.log_softmax(z, dim=1)
        logprob = log_q.gather(1, actions[:, None]).squeeze(1)
        entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(1)
        return log_q, logprob, entropy

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor, d_entropy: Tensor) -> tuple[Any, ...]:
        hidden, head, actions = ctx.saved_tensors
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for lo in range(0, len(hidden), ctx.rows):
            part = slice(lo, lo + ctx.rows)
            log_q, _, entropy = _ChunkedLogProbs.tile(hidden[part], head, actions[part], ctx.banned)
            q = log_q.exp()
            slope = (
                log_q.masked_fill_(log_q == -torch.inf, 0.0).add_(entropy[:, None]).mul_(-d_entropy[part, None]).sub_(d_logprob[part, None])
            )
            dz = q.mul_(slope)
            dz.scatter_add_(1, actions[part, None], d_logprob[part, None])
            dz = dz.to(head.dtype)
            d_hidden[part] = dz @ head
            d_head.addmm_(dz.T.float(), hidden[part].float())
        return d_hidden, d_head.to(head.dtype), None, None, None


def chunked(rows: int, all_rows: bool) -> Callable[[Problem], Tensor]:
    def call(p: Problem) -> Tensor:
        at, T = p["action_rows"], p["hidden"].shape[0]
        if all_rows:
            actions = torch.zeros(T, dtype=torch.int64, device=at.device).index_copy_(0, at, p["actions"])
            logprob, entropy = _ChunkedLogProbs.apply(p["hidden"], p["lm_head"], actions, p["value_token_ids"], rows)
            logprob, entropy = logprob[at], entropy[at]
        else:
            logprob, entropy = _ChunkedLogProbs.apply(p["hidden"][at], p["lm_head"], p["actions"], p["value_token_ids"], rows)
        plus, minus = p["value_token_ids"]
        column = (p["lm_head"][plus] - p["lm_head"][minus]).float()
        values = {kind: (p["hidden"][p[f"{kind}_rows"]].float() * column).sum(1) for kind in "vq"}
        return rest_of_loss(logprob, entropy, values, p)

    return call


def ours(impl: str, inplace: bool) -> Callable[[Problem], Tensor]:
    return lambda p: fused_loss(**p, config=CONFIG, impl=impl, inplace=inplace, check=False).loss


def liger(p: Problem) -> Tensor:
    """Liger's fused linear scaled cross-entropy: log-probs, entropy and selected log-probs of the whole vocabulary. w+ and w- are taken out of them:
    log q_a = log p_a - log(1 - p+ - p-)."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as Fused

    at, pair = p["action_rows"], torch.tensor(p["value_token_ids"], device=p["hidden"].device)
    nll, h, picked = Fused.apply(p["hidden"][at], p["lm_head"], p["actions"], 1.0, -100, 1, True, pair)
    mass = 1 - picked.exp().sum(1)
    entropy = (h.float() + (picked.exp() * picked).sum(1)) / mass + mass.log()
    plus, minus = p["value_token_ids"]
    column = (p["lm_head"][plus] - p["lm_head"][minus]).float()
    values = {kind: (p["hidden"][p[f"{kind}_rows"]].float() * column).sum(1) for kind in "vq"}
    return rest_of_loss(-nll.float() - mass.log(), entropy, values, p)


def cce(p: Problem) -> Tensor:
    """Apple's cut cross-entropy: log-probs alone (no entropy, w+ and w- stay in its softmax). On random logits its gradient filter skips nearly
    everything: not a training time."""
    from cut_cross_entropy import linear_cross_entropy

    at = p["action_rows"]
    logprob = -linear_cross_entropy(p["hidden"][at], p["lm_head"], p["actions"], reduction="none").float()
    return reference.policy_loss(logprob, p["old_logprobs"], p["advantages"], 0.2, 0.2, 3.0).mean()


def flash_attention(p: Problem) -> Tensor:
    """flash-attn's cross-entropy in place: log-probs alone."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    nll, _ = cross_entropy_loss(p["logits"][p["action_rows"]], p["actions"], inplace_backward=True)
    return reference.policy_loss(-nll, p["old_logprobs"], p["advantages"], 0.2, 0.2, 3.0).mean()


class Method:
    """A way to the loss: ``rows`` says what it is given."""

    def __init__(self, name: str, call: Callable[[Problem], Tensor], rows: str, destroys: bool = False, package: str = "") -> None:
        self.name, self.call, self.rows, self.destroys, self.package = name, call, rows, destroys, package


def methods(form: str, device: str, compile_: bool) -> tuple[list[Method], dict[str, str]]:
    """What can run here, and what cannot with the reason."""
    found, missing = [], {}
    for line in backends.explain():
        if line.operation != "row_pass":
            continue
        serves = "every device" in line.reason or device in line.reason
        if line.available and serves:
            if form == "logits":
                found.append(Method(f"ours, {line.backend}, in place", ours(line.backend, True), "all", destroys=True))
            found.append(Method(f"ours, {line.backend}", ours(line.backend, False), "all"))
        else:
            missing[f"ours, {line.backend}"] = line.reason if not line.available else f"serves {line.reason}"
    found += [Method("eager, action rows", eager, "all"), Method("eager, as shipped", eager_all_rows, "all")]
    if compile_:
        found.append(Method("torch.compile, action rows", torch.compile(eager, dynamic=False), "all"))
        found.append(Method("torch.compile, as shipped", torch.compile(eager_all_rows, dynamic=False), "all"))
    if form == "hidden":
        for name, rows in (("TRL's chunks (4,096 rows)", 4096), ("verl's chunks (512 rows)", 512)):
            found.append(Method(f"{name}, action rows", chunked(rows, False), "all"))
            found.append(Method(f"{name}, as shipped", chunked(rows, True), "all"))
    packages = {"hidden": (("liger_kernel", "Liger scaled CE", liger), ("cut_cross_entropy", "CCE", cce)),
                "logits": (("flash_attn", "flash-attn CE", flash_attention),)}[form]  # fmt: skip
    for package, name, call in packages:
        if importlib.util.find_spec(package) is None:
            missing[name] = f"{package} is not installed"
        elif device != "cuda":
            missing[name] = "needs a CUDA device"
        else:
            found.append(Method(f"{name}, action rows", call, "compacted", package=package))
    return found, missing


# ---------------------------------------------------------------------------------------------------------- time, memory, error


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def one(method: Method, p: Problem, device: str) -> tuple[float, float]:
    """Seconds of a forward and of its backward. Tensors a method destroys are copied outside the clock."""
    given = dict(p)
    for name in leaves(p):
        x = p[name].detach().requires_grad_()
        given[name] = x.clone() if method.destroys else x
    synchronize(device)
    start = time.perf_counter()
    loss = method.call(given)
    synchronize(device)
    middle = time.perf_counter()
    if method.destroys:  # the model's own backward goes on from here
        torch.autograd.grad(loss, [given[name] for name in leaves(p)])
    else:
        loss.backward()
    synchronize(device)
    return middle - start, time.perf_counter() - middle


def peak_bytes(method: Method, p: Problem, device: str) -> int:
    """Most memory alive at once beyond the problem's own, gradients included: counted by the allocator."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one(method, p, device)
        return torch.cuda.max_memory_allocated() - before - (nbytes(p) if method.destroys else 0)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        one(method, p, device)
    events = sorted((e.start_ns(), e.nbytes()) for e in profile.kineto_results.events() if e.name() == "[memory]")
    alive = most = 0
    for _, size in events:
        alive += size
        most = max(most, alive)
    return most - (nbytes(p) if method.destroys else 0)


def nbytes(p: Problem) -> int:
    return sum(p[name].nbytes for name in leaves(p))


def max_error(method: Method, form: str, dtype: torch.dtype, device: str) -> float:
    """Against float64 on a small problem: loss and gradients, relative to the largest entry. CCE and flash-attn make another loss: NaN."""
    if method.call in (cce, flash_attention):
        return float("nan")
    p = make(form, 64, 0.5, 64, 2048, dtype, device)
    right_p = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in p.items()}
    worst = 0.0
    found = []
    for call, q in ((method.call, p), (eager, right_p)):
        xs = {name: q[name].detach().clone().requires_grad_() for name in leaves(q)}
        given = {**q, **({name: x * 1.0 for name, x in xs.items()} if call is method.call and method.destroys else xs)}
        loss = call(given)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(xs.values()))])
    for x, y in zip(*found, strict=True):
        worst = max(worst, float((x.double() - y).abs().max() / y.abs().max()))
    return worst


def floor_seconds(form: str, p: Problem, device: str) -> float:
    """The least a machine could take at its own rates: three matrix products of the action rows, or reading and writing them once."""
    at = p["action_rows"]

    def least(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(4):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    if form == "hidden":
        h = p["hidden"][at]
        space = torch.empty(len(at), p["lm_head"].shape[0], dtype=h.dtype, device=device)
        return 3 * least(lambda: torch.mm(h, p["lm_head"].T, out=space))
    rows = p["logits"][at]
    space = torch.empty_like(rows)
    return least(lambda: space.copy_(rows))


# --------------------------------------------------------------------------------------------------------------------- the table


def cases(quick: bool, device: str) -> list[tuple[int, float, int, int]]:
    """(T, share, H, V)."""
    if quick:
        return [(256, 1.0, 576, 49_152), (512, 0.15, 576, 49_152)]
    found = [(T, share, 576, 49_152) for T in (256, 512, 1024) for share in (0.05, 0.15, 0.5, 1.0)]
    found += [(256, share, 896, 151_936) for share in (0.15, 1.0)]
    if device == "cuda":
        found += [(T, share, H, 151_936) for T in (4096, 16_384) for H in (1536, 3584) for share in (0.05, 0.15, 0.5, 1.0)]
    return found


def measure(form: str, case: tuple[int, float, int, int], ways: list[Method], options: argparse.Namespace) -> list[dict[str, Any]]:
    T, share, H, V = case
    p = make(form, T, share, H, V, options.torch_dtype, options.device)
    given = {method.name: compacted(p) if method.rows == "compacted" else p for method in ways}
    times: dict[str, list[tuple[float, float]]] = {method.name: [] for method in ways}
    peak, failed = {}, {}
    for method in ways:
        try:
            one(method, given[method.name], options.device)
            peak[method.name] = peak_bytes(method, given[method.name], options.device)
        except (RuntimeError, ImportError, TypeError) as error:
            failed[method.name] = str(error).splitlines()[0][:120]
    running = [method for method in ways if method.name not in failed]
    for _ in range(options.rounds):
        for method in running:
            if sum(map(sum, times[method.name])) < BUDGET or not times[method.name]:
                times[method.name].append(one(method, given[method.name], options.device))
    least = floor_seconds(form, p, options.device)
    medians = {m.name: [statistics.median(x) for x in zip(*((f, b, f + b) for f, b in times[m.name]), strict=True)] for m in running}
    first = medians[running[0].name][2]
    rows = []
    for method in running:
        forward, backward, both = medians[method.name]
        rows.append(
            {
                "form": form, "T": T, "active_share": share, "H": H if form == "hidden" else "", "V": V, "method": method.name,
                "forward_ms": f"{forward * 1e3:.4g}", "backward_ms": f"{backward * 1e3:.4g}", "median_ms": f"{both * 1e3:.4g}",
                "rounds": len(times[method.name]), "times_ours": f"{both / first:.3g}", "share_of_floor": f"{least / both:.3g}",
                "peak_mb": f"{peak[method.name] / 1e6:.4g}",
                "max_error": f"{max_error(method, form, options.torch_dtype, options.device):.2g}",
            }
        )  # fmt: skip
    for name, reason in failed.items():
        print(f"{name}: fails here: {reason}", flush=True)
    return rows


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Time and peak memory over the share of action rows, at the most rows measured with the first vocabulary, one column a form."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    forms = list(dict.fromkeys(row["form"] for row in rows))
    figure, axes = plt.subplots(2, len(forms), figsize=(6 * len(forms), 8), layout="constrained", squeeze=False)
    for column, form in enumerate(forms):
        mine = [row for row in rows if row["form"] == form and row["V"] == rows[0]["V"]]
        shown = [row for row in mine if row["T"] == max(x["T"] for x in mine)]
        for name in dict.fromkeys(row["method"] for row in shown):
            points = sorted((row["active_share"], float(row["median_ms"]), float(row["peak_mb"])) for row in shown if row["method"] == name)
            for line, key in ((0, 1), (1, 2)):
                axes[line][column].plot([x[0] for x in points], [x[key] for x in points], marker="o", label=name)
        for line, label in ((0, "milliseconds, forward and backward"), (1, "peak memory, MB")):
            axes[line][column].set(
                xlabel="share of action rows", ylabel=label, yscale="log", title=f"{form}, T = {shown[0]['T']}, V = {shown[0]['V']}"
            )
            axes[line][column].grid(alpha=0.3)
        axes[0][column].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


def processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads on the CPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--forms", nargs="+", choices=("hidden", "logits"), default=["hidden", "logits"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--quick", action="store_true", help="two cases a form")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which needs a C++ compiler on a CPU")
    options = parser.parse_args()
    options.torch_dtype = getattr(torch, options.dtype)
    torch.set_num_threads(options.threads)
    load, rows = os.getloadavg()[0], []
    for form in options.forms:
        ways, missing = methods(form, options.device, not options.no_compile)
        ways.sort(key=lambda m: not m.name.startswith("ours") or "torch" in m.name)  # ours first: the ratios' unit
        for name, reason in missing.items():
            print(f"{form}: not run: {name}: {reason}", flush=True)
        for case in cases(options.quick, options.device):
            torch._dynamo.reset()  # one compilation a case, as for a fixed shape
            for row in measure(form, case, ways, options):
                print(
                    f"{form:<6} T={row['T']:<5} {row['active_share']:>5.0%} V={row['V']:<6} {row['method']:<38} {row['median_ms']:>8} ms "
                    f"{row['times_ours']:>6} x ours  {row['share_of_floor']:>6} of floor  {row['peak_mb']:>6} MB  error {row['max_error']}",
                    flush=True,
                )
                rows.append(row)
    about = {
        "date": datetime.date.today().isoformat(), "processor": processor(options.device), "cores": os.cpu_count(),
        "threads": options.threads, "dtype": options.dtype, "torch": torch.__version__, "load_before": f"{load:.1f}",
        "load_after": f"{os.getloadavg()[0]:.1f}",
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    where = "cuda" if options.device == "cuda" else f"cpu_t{options.threads}"
    target = options.out / f"kernels_{where}_{options.dtype}.csv"
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    plot(rows, target.with_suffix(".png"), f"{about['processor']}, {options.dtype}, {options.threads} threads, torch {torch.__version__}")
    print(target)


if __name__ == "__main__":
    main()
