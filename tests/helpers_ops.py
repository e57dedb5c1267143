"""Random problems for the public operations, their float64 answer, and the measure of error.

Legend: T rows, N action tokens, M turns, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sapo_fast import LossConfig, reference

HALF_FLOOR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def problem(
    seed: int = 0,
    *,
    T: int = 17,
    N: int = 11,
    M: int = 4,
    V: int = 37,
    H: int = 6,
    scale: float = 1.5,
    repeat: bool = True,
    bias: bool = True,
) -> dict[str, Any]:
    """Float64 tensors: hidden, lm_head, lm_head_bias and every other keyword of `fused_loss` but config."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    plus, minus = torch.randperm(V, generator=g)[:2].tolist()
    allowed = torch.tensor([i for i in range(V) if i not in (plus, minus)])
    rows = torch.randint(0, T, (N,), generator=g) if repeat else torch.randperm(T, generator=g)[:N]
    actions = allowed[torch.randint(0, len(allowed), (N,), generator=g)]
    p: dict[str, Any] = {
        "hidden": randn(T, H) * scale,
        "lm_head": randn(V, H),
        "lm_head_bias": randn(V) if bias else None,
        "value_token_ids": (plus, minus),
        "action_rows": rows,
        "actions": actions,
        "advantages": randn(N),
    }
    logits = logits_of(p)
    logprob, _ = reference.token_logprobs(logits=logits, value_token_ids=(plus, minus), action_rows=rows, actions=actions)
    p["old_logprobs"] = -(logprob + 0.4 * randn(N)).abs()
    p["ref_logprobs"] = -(logprob + 0.4 * randn(N)).abs()
    p["token_weights"] = torch.rand(N, generator=g, dtype=torch.float64) * 2
    for kind in "vq":
        at = torch.randint(0, T, (M,), generator=g)
        p[f"{kind}_rows"] = at
        p[f"{kind}_old"] = 10 * (logits[at, plus] - logits[at, minus]) + 3 * randn(M)
        p[f"{kind}_targets"] = 10 * randn(M)
    return p


def logits_of(p: dict[str, Any]) -> Tensor:
    return torch.nn.functional.linear(p["hidden"], p["lm_head"], p["lm_head_bias"])


def as_logits(p: dict[str, Any]) -> dict[str, Any]:
    """The same problem in the logits form."""
    q = {k: v for k, v in p.items() if k not in ("hidden", "lm_head", "lm_head_bias")}
    return {"logits": logits_of(p), **q}


WIDE = ("logits", "hidden", "lm_head", "lm_head_bias")
FORMS = {"hidden": lambda p: p, "logits": as_logits}


def cast(p: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The model's tensors in ``dtype``; per-token inputs in float32 (float64 for float64)."""
    small = torch.float64 if dtype == torch.float64 else torch.float32
    return {k: v.to(dtype if k in WIDE else small) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in p.items()}


def up(p: dict[str, Any]) -> dict[str, Any]:
    """The very same numbers in float64."""
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in p.items()}


def run(fn: Callable[..., Any], p: dict[str, Any], upstream: float = 1.0, **kwargs: Any) -> dict[str, Tensor]:
    """Call a fused loss and its backward: loss, outputs, metrics, and the gradient of every model tensor."""
    leaves = {k: p[k].detach().clone().requires_grad_() for k in WIDE if p.get(k) is not None}
    out = fn(**{**p, **leaves}, **kwargs)
    grads = torch.autograd.grad(out.loss * upstream, list(leaves.values()))
    found = {"loss": out.loss.detach(), "logprobs": out.logprobs.detach(), "entropy": out.entropy.detach()}
    found |= {"v": out.v.detach(), "q": out.q.detach()}
    found |= {f"d_{k}": g for k, g in zip(leaves, grads, strict=True)}
    return found | {f"metric {k}": m.detach() for k, m in out.metrics.items()}


def error(found: Tensor, right: Tensor) -> float:
    """Largest difference, in units of the right answer's largest entry (at least 1e-6:
    the float64 reference itself loses a log-probability of -1e-20)."""
    found, right = found.double(), right.double()
    if right.numel() == 0:
        assert found.shape == right.shape
        return 0.0
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-6))


def assert_as_good(
    found: dict[str, Tensor], plain: dict[str, Tensor], right: dict[str, Tensor], floor: float, skip: tuple[str, ...] = ()
) -> None:
    """Error at most 3 times plain torch's in the same type, plus a floor."""
    assert set(found) == set(right)
    for name in right:
        if name in skip:
            continue
        assert torch.isfinite(found[name]).all(), name
        ours, theirs = error(found[name], right[name]), error(plain[name], right[name])
        # Metrics are means of exp(): a rounding of a log-probability near -20 counts many times.
        least = floor * 8 if name.startswith("metric ") else floor
        assert ours <= 3 * theirs + least, f"{name}: error {ours:.3g}, plain torch {theirs:.3g}, floor {least:.3g}"


CONFIGS = {
    "default": LossConfig(),
    "all on": LossConfig(entropy_coef=0.05, kl_coef=0.3, temperature=0.7, tau_v=0.5, clip_low=0.1, clip_high=0.3, dual_clip=1.2),
    "clip readout": LossConfig(readout="clip", tau_v=4.0, r_max=3.0, v_clip=0.1, q_clip=None, entropy_coef=0.0),
    "no clips": LossConfig(clip_low=None, clip_high=None, dual_clip=None, v_clip=None, q_clip=None, kl_coef=0.0),
    "one-sided": LossConfig(clip_low=None, clip_high=0.2, dual_clip=3.0, v_coef=0.0, q_coef=1.0, temperature=1.3),
}
