"""Targets and normalised advantages at once: `turn_gae` and `normalize_advantages` with one read of the data fewer and, on a GPU, no wait for the device.

Legend: T turns, B trajectories.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backends, native
from . import checks_turns as checks
from .advantage import TurnTargets, gather_moments, merge_moments, normalize_advantages, turn_gae


def normalized_turn_gae(
    rewards: Tensor,
    values: Tensor,
    q_values: Tensor | None = None,
    *,
    cu_turns: Tensor,
    gamma: float = 0.95,
    lam: float = 0.95,
    lam_v: float | None = None,
    bootstrap: Tensor | None = None,
    invalid: Tensor | None = None,
    invalid_penalty: float = 0.1,
    valid: Tensor | None = None,
    eps: float = 1e-8,
    min_std: float = 1e-4,
    process_group: Any = None,
    impl: str = "auto",
    check: bool = True,
) -> tuple[TurnTargets, Tensor]:
    """`turn_gae`, and its advantages after `normalize_advantages`; same arguments, same numbers.

    The native libraries take the statistics in the pass that makes the advantages; the ranks of ``process_group`` merge them exactly (count, mean,
    squared deviations, in rank order) where they lie. With ``check=False`` nothing looks at the data from the host, so that the call can be
    captured into a CUDA graph; a NaN then stays in its trajectory's targets but spoils every normalised advantage.

    Returns:
        (targets, normalised advantages [T])

    Raises:
        ValueError: as the two functions do.
    """
    checks.turn_gae(rewards, values, q_values, cu_turns, gamma, lam, lam_v, bootstrap, impl)
    checks.normalize_advantages(rewards, invalid, invalid_penalty, eps, min_std, valid)
    given = [x for x in (rewards, values, q_values, bootstrap) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    _, fn = backends.select("turn_gae", impl, rewards.device, dtype)
    if fn is not native.turn_gae:
        options = {"gamma": gamma, "lam": lam, "lam_v": lam_v, "bootstrap": bootstrap, "impl": impl, "check": check}
        targets = turn_gae(rewards, values, q_values, cu_turns=cu_turns, **options)
        penalty = {"invalid": invalid, "invalid_penalty": invalid_penalty, "valid": valid}
        return targets, normalize_advantages(targets.advantages, **penalty, eps=eps, min_std=min_std, process_group=process_group)

    if check:
        checks.turn_data(rewards, values, q_values, cu_turns, bootstrap)

    def floats(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype).contiguous()

    def flags(x: Tensor | None) -> Tensor | None:
        return None if x is None else (x != 0).contiguous()

    with torch.no_grad():
        ops = torch.ops.sapo_fast
        r, v, q, after, bad, counted = floats(rewards), floats(values), floats(q_values), floats(bootstrap), flags(invalid), flags(valid)
        offsets = (cu_turns if cu_turns.dtype == torch.int32 else cu_turns.to(torch.int64)).contiguous()
        found = ops.turn_gae(
            r, v, q, after, bad, counted, offsets, gamma, lam, lam if lam_v is None else lam_v, invalid_penalty, False, True
        )
        advantages, v_targets, q_targets, moments = found
        parts = moments[None] if process_group is None else gather_moments(moments, process_group)
        if check:
            checks.finite_advantages((~parts[:, 1].isfinite()).double(), advantages, process_group is not None)
        if process_group is not None:
            moments = torch.stack(merge_moments(parts))
        normalized = ops.normalize(advantages, moments, bad, counted, invalid_penalty, eps, min_std)
        return TurnTargets(advantages, v_targets, None if q_values is None else q_targets), normalized
