"""The compiled libraries: loading, what torch must know about their operators, and their place in the registry.

``_cpu.abi3.so`` and ``_cuda.abi3.so`` lie beside this file where an install could build them (see setup.py); without them everything works in plain
torch. The operators, ``torch.ops.sapo_fast.*``, take contiguous tensors of one device and return new ones:

``turn_gae(rewards, values, q_values, bootstrap, invalid, valid, cu_turns, gamma, lam, lam_v, invalid_penalty, check, moments)``
    -> advantages, v_targets, q_targets ([0] without q_values), moments ([0] where not wanted).
``token_gae(rewards, values, bootstrap, action_mask, cu_tokens, gamma, lam, lam_v, check, moments)``
    -> advantages, v_targets (both 0 where the mask is), q_targets [0], moments. A token outside the mask neither steps nor decays; a reward it
    carries goes to the action before it.
``normalize(advantages, moments, invalid, valid, invalid_penalty, eps, min_std)`` -> (A - penalty - mean) / (std + eps), as `normalize_advantages`.
``row_*``: see `sapo_fast.native_rows`.

With ``check`` the CPU operators look at the data on their way and raise RuntimeError on a number that is not finite, or a token paid before the
first action of its trajectory; which one it is the checks in torch find out. The CUDA operators never look.

Moments, [4] float64: count, mean, sum of squared deviations and largest size of the advantages as returned, valid turns only, less the penalty of invalid
ones. They come out of the same pass and stay on the device.

Legend: T turns or tokens in all, B trajectories; rewards, values, q_values [T] float32; bootstrap [B] float32; flags [T] bool; cu_* [B+1] int32 or
int64.
"""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import backends

#: Raised together with SAPO_INTERFACE_VERSION in csrc/interface.h.
INTERFACE = 5

_HERE = Path(__file__).resolve().parent


def _why_missing(name: str) -> str:
    """Why the install went without a library: what setup.py wrote down."""
    record = _HERE / "native_build.json"
    reason = json.loads(record.read_text()).get(name) if record.exists() else None
    return f"not compiled at install: {reason or 'no record of the build; reinstall with pip install -v to see why'}"


def _load(name: str) -> str | None:
    """Load a library; None, or the reason it cannot be used."""
    path = _HERE / f"{name}.abi3.so"
    if not path.exists():
        return _why_missing(name)
    try:
        torch.ops.load_library(path)
        found = ctypes.CDLL(str(path)).sapo_fast_interface()
    except (OSError, AttributeError) as error:
        return f"{path.name} does not load into torch {torch.__version__}: {error}"
    if found != INTERFACE:
        return f"{path.name} was built from other sources (interface {found}, this package has {INTERFACE}): reinstall the package"
    return None


@functools.cache
def cpu_obstacle() -> str | None:
    """Why the CPU kernels cannot run here; None when they can. The first call loads the library and registers the fakes."""
    reason = _load("_cpu")
    if reason is None:
        torch.library.register_fake("sapo_fast::turn_gae", _turn_gae_fake)
        torch.library.register_fake("sapo_fast::token_gae", _token_gae_fake)
        torch.library.register_fake("sapo_fast::normalize", _normalize_fake)
    return reason


@functools.cache
def cuda_obstacle() -> str | None:
    """Why the CUDA kernels cannot run here; None when they can. Loads the library where there is a device, and runs one turn on it."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    reason = cpu_obstacle() or _load("_cuda")
    if reason is not None:
        return reason
    try:
        one = torch.ones(1, device="cuda")
        torch.ops.sapo_fast.turn_gae(one, one, None, None, None, None, torch.tensor([0, 1], device="cuda"), 1.0, 1.0, 1.0, 0.0, False, True)
        torch.cuda.synchronize()
    except RuntimeError as error:
        name = torch.cuda.get_device_name()
        return (
            f"the kernels do not run on {name} ({error}); build for it: SAPO_FAST_CUDA=1 SAPO_FAST_CUDA_ARCHS=<capability> pip install ..."
        )
    return None


def _targets_fake(rewards: Tensor, with_q: bool, moments: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_targets = torch.empty_like(rewards) if with_q else rewards.new_empty(0)
    return torch.empty_like(rewards), torch.empty_like(rewards), q_targets, rewards.new_empty(4 if moments else 0, dtype=torch.float64)


def _turn_gae_fake(
    rewards: Tensor,
    values: Tensor,
    q_values: Tensor | None,
    bootstrap: Tensor | None,
    invalid: Tensor | None,
    valid: Tensor | None,
    cu_turns: Tensor,
    gamma: float,
    lam: float,
    lam_v: float,
    invalid_penalty: float,
    check: bool,
    moments: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _targets_fake(rewards, q_values is not None, moments)


def _token_gae_fake(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor | None,
    action_mask: Tensor,
    cu_tokens: Tensor,
    gamma: float,
    lam: float,
    lam_v: float,
    check: bool,
    moments: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _targets_fake(rewards, False, moments)


def _normalize_fake(
    advantages: Tensor,
    moments: Tensor,
    invalid: Tensor | None,
    valid: Tensor | None,
    invalid_penalty: float,
    eps: float,
    min_std: float,
) -> Tensor:
    return torch.empty_like(advantages)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    q_values: Tensor | None,
    bootstrap: Tensor,
    cu_turns: Tensor,
    gamma: float,
    lam: float,
    lam_v: float,
    check: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The registry's form of the operator (`backends`), and on the CPU ``check``."""
    found = torch.ops.sapo_fast.turn_gae(rewards, values, q_values, bootstrap, None, None, cu_turns, gamma, lam, lam_v, 0.0, check, False)
    advantages, v_targets, q_targets, _ = found
    return advantages, v_targets, None if q_values is None else q_targets


def checked_turn_gae(*given: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """`backends`' turn_gae on the CPU, looking at the data on its way. None: they break a rule, and checks in torch must say which."""
    try:
        return turn_gae(*given, check=True)
    except RuntimeError:
        return None


def token_gae(
    rewards: Tensor,
    values: Tensor,
    keep: Tensor,
    cu_tokens: Tensor,
    gamma: float,
    lam: float,
    check: bool,
) -> tuple[Tensor, Tensor] | None:
    """(advantages, returns) of the tokens where ``keep`` is; one lambda, nothing after the last token. Any strides. None as `checked_turn_gae`."""
    given = (rewards.contiguous(), values.contiguous(), None, keep.contiguous(), cu_tokens.contiguous())
    try:
        return torch.ops.sapo_fast.token_gae(*given, gamma, lam, lam, check, False)[:2]
    except RuntimeError:
        if not check:
            raise
        return None


def _rows() -> Any:
    """The registry's "cpp" row pass; its module tells torch about operators that are loaded by now."""
    from .native_rows import CppRows

    return CppRows()


_HALF_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
backends.register("row_pass", "cpp", _rows, cpu_obstacle, devices=("cpu",), dtypes=_HALF_AND_SINGLE)
backends.register("turn_gae", "cpp", lambda: turn_gae, cpu_obstacle, devices=("cpu",), dtypes=(torch.float32,))
backends.register("turn_gae", "cuda", lambda: turn_gae, cuda_obstacle, devices=("cuda",), dtypes=(torch.float32,))
