"""Which implementation runs: ``impl = "auto" | "torch" | "cpp" | "triton" | "cuda"``.

An operation here is a piece that can be swapped, not a public function:

``row_pass``  statistics of vocabulary rows and their gradient; used by `fused_loss` and `token_logprobs`. The registered object is a
              `sapo_fast.row_pass.RowKernel`.
``turn_gae``  the recursion over turns; used by `turn_gae`. The registered object is a function
              ``fn(rewards, values, q_values, bootstrap, cu_turns, gamma, lam, lam_v) -> (advantages, v_targets, q_targets)``.
              It receives checked, contiguous tensors of one floating type (float32 or float64) on one device: rewards and values [T],
              q_values [T] or None, bootstrap [B], cu_turns [B+1] int64, and Python floats; it returns new tensors [T] of that type
              (q_targets None when q_values is). A NaN must not leave its trajectory.

A kernel plugs itself in with `register`, from one of the provider modules below, which are imported the first time a choice is made.
"torch" needs nothing and is always there.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

IMPLS = ("auto", "torch", "cpp", "triton", "cuda")
OPERATIONS = ("row_pass", "turn_gae")

_PROVIDERS = ("sapo_fast.row_pass", "sapo_fast.advantage", "sapo_fast.native", "sapo_fast.cuda_rows", "sapo_fast.triton_rows")
# Fastest first; a backend that does not serve the device, the dtype or this machine is passed over by "auto".
_PREFERENCE = ("cuda", "triton", "cpp", "torch")

_log = logging.getLogger("sapo_fast")


class Availability(NamedTuple):
    """One line of `explain`."""

    operation: str
    backend: str
    available: bool
    reason: str


@dataclass(frozen=True)
class _Entry:
    load: Callable[[], Any]
    probe: Callable[[], str | None]
    devices: tuple[str, ...]
    by_name_only: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] | None


_table: dict[tuple[str, str], _Entry] = {}
_loaded: dict[tuple[str, str], Any] = {}
_probed: dict[tuple[str, str], str | None] = {}
_announced: set[tuple[str, str, str]] = set()
_providers_imported = False


def register(
    operation: str,
    backend: str,
    load: Callable[[], Any],
    probe: Callable[[], str | None],
    *,
    devices: tuple[str, ...],
    by_name_only: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Offer ``backend`` for ``operation``.

    Args:
        operation: one of `OPERATIONS`.
        backend: one of `IMPLS` but "auto".
        load: called once, at first use; returns the function or object described in the module's text.
        probe: called once; None when it can run on this machine, else the reason why not, in words a user can act on.
        devices: device types it serves, e.g. ``("cpu",)``; ``("any",)`` for all.
        by_name_only: further device types, served where ``impl`` names this backend and passed over by "auto".
        dtypes: floating types it serves; None for all.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {OPERATIONS}, got {operation!r}")
    if backend not in IMPLS[1:]:
        raise ValueError(f"backend must be one of {IMPLS[1:]}, got {backend!r}")
    key = (operation, backend)
    _table[key] = _Entry(load, probe, devices, by_name_only, dtypes)
    _loaded.pop(key, None)
    _probed.pop(key, None)


def _import_providers() -> None:
    global _providers_imported
    if _providers_imported:
        return
    _providers_imported = True
    for name in _PROVIDERS:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def _machine_reason(key: tuple[str, str]) -> str | None:
    """Why this backend cannot run on this machine at all; None when it can."""
    if key not in _table:
        return f"{key[0]} has no {key[1]} kernel in this installation"
    if key not in _probed:
        _probed[key] = _table[key].probe()
    return _probed[key]


def _tensor_reason(key: tuple[str, str], device: torch.device, dtype: torch.dtype, named: bool) -> str | None:
    """Why this backend cannot serve tensors of this device and dtype; None when it can. ``named``: asked for by name."""
    entry = _table[key]
    devices = entry.devices + entry.by_name_only if named else entry.devices
    if "any" not in devices and device.type not in devices:
        return f"impl={key[1]!r} serves {' and '.join(devices)} tensors, these are on {device.type}"
    if entry.dtypes is not None and dtype not in entry.dtypes:
        served = ", ".join(str(d).removeprefix("torch.") for d in entry.dtypes)
        return f"impl={key[1]!r} serves {served}, these are {str(dtype).removeprefix('torch.')}"
    return None


def _load(key: tuple[str, str]) -> None:
    if key not in _loaded:
        _loaded[key] = _table[key].load()


def select(operation: str, impl: str, device: torch.device, dtype: torch.dtype) -> tuple[str, Any]:
    """The backend to use and its object. An explicit ``impl`` is used or refused, never replaced.

    Raises:
        ValueError: unknown ``impl``, or one that does not serve these tensors.
        RuntimeError: ``impl`` is known and serves such tensors but cannot run on this machine.
    """
    check_impl(impl)
    # Two steps, so that torch.compile can take the choice as a constant and still see which object is called.
    name = _choose(operation, impl, device, dtype)
    return name, _loaded[(operation, name)]


def _choose(operation: str, impl: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend; its object is loaded."""
    _import_providers()
    if impl != "auto":
        key = (operation, impl)
        if key in _table:
            reason = _tensor_reason(key, device, dtype, named=True)
            if reason is not None:
                raise ValueError(f"{reason}; use impl='auto' or 'torch', or move the tensors")
        reason = _machine_reason(key)
        if reason is not None:
            raise RuntimeError(f"impl={impl!r} cannot be used for {operation}: {reason}; use impl='auto' or 'torch'")
        _load(key)
        return impl
    passed_over = []
    for backend in _PREFERENCE:
        key = (operation, backend)
        if key not in _table:
            continue
        reason = _tensor_reason(key, device, dtype, named=False) or _machine_reason(key)
        if reason is None:
            note = (operation, backend, device.type)
            if note not in _announced:
                _announced.add(note)
                why = "; ".join(passed_over) or "first choice"
                _log.info("%s on %s: %s (%s)", operation, device.type, backend, why)
            _load(key)
            return backend
        passed_over.append(f"not {backend}: {reason}")
    raise RuntimeError(f"no implementation of {operation} for {device.type}: {'; '.join(passed_over)}")


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (and triton) together with this package.
_choose._dynamo_marked_constant = True


def check_impl(impl: str) -> None:
    """ValueError unless ``impl`` is a known name."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")


def explain() -> list[Availability]:
    """Every operation and backend: can it run on this machine, and if not, why not."""
    _import_providers()
    lines = []
    for operation in OPERATIONS:
        for backend in IMPLS[1:]:
            reason = _machine_reason((operation, backend))
            if reason is None:
                devices = _table[(operation, backend)].devices
                note = "every device" if "any" in devices else f"{' and '.join(devices)} tensors"
                lines.append(Availability(operation, backend, True, note))
            else:
                lines.append(Availability(operation, backend, False, reason))
    return lines
