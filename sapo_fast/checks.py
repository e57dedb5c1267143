"""Checks of the loss, the log-probabilities and the readout: the argument, the rule, the value got, the fix.

Nothing is computed before they pass.

Checks of shapes, types and devices are free. Checks of data collect one flag each and read all of them at once: on a GPU that waits for the
device once a call, and only when ``check`` is True.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import backends

if TYPE_CHECKING:
    from .loss import LossConfig

READOUTS = ("linear", "clip")
#: A log-probability may be above 0 by rounding. More is something else: a probability, or a negative log-likelihood.
POSITIVE_LOGPROB = 1e-3
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# --------------------------------------------------------------------------------------------------------------------- numbers


def number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")


def positive(name: str, value: Any) -> None:
    number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be > 0 and finite, got {value!r}")


def not_negative(name: str, value: Any) -> None:
    number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")


def fraction(name: str, value: Any) -> None:
    number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")


def readout_name(readout: Any) -> None:
    if readout not in READOUTS:
        raise ValueError(f"readout must be one of {', '.join(READOUTS)}; got {readout!r}")


def loss_config(config: LossConfig) -> None:
    for name in ("clip_low", "clip_high", "v_clip", "q_clip"):
        value = getattr(config, name)
        if value is not None:
            number(name, value)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, or None to switch it off; got {value!r}")
    if config.dual_clip is not None:
        number("dual_clip", config.dual_clip)
        if not 1 < config.dual_clip < math.inf:
            raise ValueError(f"dual_clip must be > 1 and finite, or None to switch it off; got {config.dual_clip!r}")
    for name in ("v_coef", "q_coef", "kl_coef", "entropy_coef"):
        not_negative(name, getattr(config, name))
    for name in ("r_max", "tau_v", "temperature"):
        positive(name, getattr(config, name))
    readout_name(config.readout)


# ---------------------------------------------------------------------------------------------------------- shapes, types, devices


def tensor(name: str, x: Any, dims: int, device: torch.device | None, dtypes: tuple[torch.dtype, ...], kind: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != dims:
        fix = ""
        if dims == 2:
            fix = f"; reshape to 2 dimensions: {name}.flatten(0, -2), and count action_rows and value rows in the flattened order"
        raise ValueError(f"{name} must have {dims} dimension{'s' if dims > 1 else ''}, got shape {tuple(x.shape)}{fix}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be {kind}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, the others are on {device}: move it with {name}.to({str(device)!r})")
    return x


def floats(name: str, x: Any, length: int | None, device: torch.device | None, of: str) -> Tensor:
    x = tensor(name, x, 1, device, _FLOATS, "floating point")
    entries(name, x, length, of)
    return x


def integers(name: str, x: Any, length: int | None, device: torch.device | None, of: str) -> Tensor:
    x = tensor(name, x, 1, device, _INTEGERS, "integers")
    entries(name, x, length, of)
    return x


def flags(name: str, x: Any, length: int, device: torch.device, of: str) -> Tensor:
    x = tensor(name, x, 1, device, (torch.bool, *_INTEGERS, *_FLOATS), "bool, integers or floating point")
    entries(name, x, length, of)
    return x


def entries(name: str, x: Tensor, length: int | None, of: str) -> None:
    if length is not None and x.shape[0] != length:
        raise ValueError(f"{name} must have one entry per {of}: {length}, got {x.shape[0]}")


def _whole_weight(name: str, x: Any) -> None:
    """A weight cut up by a sharding framework looks like a tensor and gives wrong numbers."""
    if isinstance(x, Tensor) and hasattr(x, "full_tensor") and hasattr(x, "placements"):
        raise ValueError(f"{name} is a DTensor: pass {name}.full_tensor(), or call inside the module's forward where FSDP has gathered it")
    if isinstance(x, Tensor) and x.numel() == 0:
        raise ValueError(f"{name} is empty, shape {tuple(x.shape)}: under ZeRO-3 call inside deepspeed.zero.GatheredParameters([{name}])")


def _source(logits: Any, hidden: Any, lm_head: Any, lm_head_bias: Any) -> tuple[Tensor, int]:
    """The tensor that has the rows, and V."""
    if (logits is None) == (hidden is None):
        got = "neither" if logits is None else "both"
        raise ValueError(f"give either logits, or hidden and lm_head; got {got} of logits and hidden")
    if logits is not None:
        for name, x in (("lm_head", lm_head), ("lm_head_bias", lm_head_bias)):
            if x is not None:
                raise ValueError(f"{name} goes with hidden; logits are given, which include it already: leave {name} out")
        if isinstance(logits, Tensor) and hasattr(logits, "full_tensor") and hasattr(logits, "placements"):
            raise ValueError("logits are a DTensor: pass logits.full_tensor()")
        return tensor("logits", logits, 2, None, _FLOATS, "floating point"), logits.shape[1]
    if lm_head is None:
        raise ValueError("hidden needs lm_head, the [V, H] weight of the LM head; got None")
    if isinstance(hidden, Tensor) and hasattr(hidden, "full_tensor") and hasattr(hidden, "placements"):
        raise ValueError("hidden is a DTensor: pass hidden.full_tensor()")
    tensor("hidden", hidden, 2, None, _FLOATS, "floating point")
    _whole_weight("lm_head", lm_head)
    tensor("lm_head", lm_head, 2, hidden.device, _FLOATS, "floating point")
    if lm_head.shape[1] != hidden.shape[1]:
        raise ValueError(f"lm_head must be [V, H] with H = {hidden.shape[1]} as hidden, got {tuple(lm_head.shape)}")
    if lm_head.dtype != hidden.dtype:
        raise ValueError(f"lm_head is {lm_head.dtype}, hidden is {hidden.dtype}: give both one type, e.g. lm_head.to(hidden.dtype)")
    if lm_head_bias is not None:
        _whole_weight("lm_head_bias", lm_head_bias)
        tensor("lm_head_bias", lm_head_bias, 1, hidden.device, _FLOATS, "floating point")
        entries("lm_head_bias", lm_head_bias, lm_head.shape[0], "row of lm_head")
        if lm_head_bias.dtype != hidden.dtype:
            raise ValueError(f"lm_head_bias is {lm_head_bias.dtype}, hidden is {hidden.dtype}: give both one type")
    return hidden, lm_head.shape[0]


def lm_head_weight(lm_head: Any) -> None:
    _whole_weight("lm_head", lm_head)
    tensor("lm_head", lm_head, 2, None, _FLOATS, "floating point")


def value_token_pair(value_token_ids: Any, vocabulary: int) -> tuple[int, int]:
    try:
        plus, minus = value_token_ids
    except (TypeError, ValueError):
        raise ValueError(f"value_token_ids must be two ids (w_plus, w_minus), got {value_token_ids!r}") from None
    for name, token in (("w_plus", plus), ("w_minus", minus)):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"value_token_ids: {name} must be a Python int, got {token!r}")
        if not 0 <= token < vocabulary:
            raise ValueError(f"value_token_ids: {name} = {token} is outside the vocabulary [0, {vocabulary})")
    if plus == minus:
        raise ValueError(f"value_token_ids: w_plus and w_minus must differ, both are {plus}")
    return plus, minus


# --------------------------------------------------------------------------------------------------------------------- data


class Data:
    """Flags on the device, read all at once; then the first that is up tells its story."""

    def __init__(self) -> None:
        self.flags: list[Tensor] = []
        self._stories: list[Callable[[Tensor], str]] = []
        self._masks: list[Callable[[], Tensor]] = []

    def none(self, mask: Tensor, story: Callable[[int], str]) -> None:
        """No entry of ``mask`` [n] may be True; ``story`` of the first one that is."""
        if mask.numel():
            self.flags.append(mask.any())
            self._masks.append(lambda: mask)
            self._stories.append(story)

    def settle(self) -> None:
        if not self.flags or torch.compiler.is_compiling():  # reading data would break the graph
            return
        raised = torch.stack(self.flags).tolist()
        for up, mask, story in zip(raised, self._masks, self._stories, strict=True):
            if up:
                raise ValueError(story(int(mask().nonzero()[0, 0])))

    def inside(self, name: str, rows: Tensor, total: int, of: str) -> None:
        self.none(
            (rows < 0) | (rows >= total),
            lambda i: f"{name}[{i}] = {int(rows[i])} is out of range: {of} has {total} rows (0 to {total - 1})",
        )

    def finite(self, name: str, x: Tensor | None, story: Callable[[int], str] | None = None) -> None:
        """No entry of ``x`` [n] may be infinite or NaN. Its extremes tell (a NaN comes through): one pass, and no mask while all is well."""
        if x is not None and x.numel():
            low, high = x.detach().aminmax()
            self.flags.append(~(low.isfinite() & high.isfinite()))
            self._masks.append(lambda: ~x.isfinite())
            self._stories.append(story or (lambda i: f"{name}[{i}] = {float(x[i])} is not finite"))

    def logprobs(self, name: str, x: Tensor | None) -> None:
        """Finite, and no entry of ``x`` [n] above 0 by more than rounding."""
        self.finite(name, x)
        if x is not None and x.numel():
            self.flags.append(x.detach().amax() > POSITIVE_LOGPROB)
            self._masks.append(lambda: x > POSITIVE_LOGPROB)
            self._stories.append(
                lambda i: (
                    f"{name}[{i}] = {float(x[i])} is above 0: give log-probabilities (natural logarithm), neither probabilities nor their "
                    "negatives"
                )
            )


def _actions(data: Data, action_rows: Tensor, actions: Tensor, pair: tuple[int, int], source: Tensor, of: str, vocabulary: int) -> None:
    data.inside("action_rows", action_rows, source.shape[0], of)
    data.none(
        (actions < 0) | (actions >= vocabulary),
        lambda i: f"actions[{i}] = {int(actions[i])} (row {int(action_rows[i])}) is outside the vocabulary [0, {vocabulary})",
    )
    for name, token in (("w_plus", pair[0]), ("w_minus", pair[1])):
        data.none(
            actions == token,
            lambda i, name=name, token=token: (
                f"actions[{i}] (row {int(action_rows[i])}) is {token}, the value token {name}, which the policy can never take: "
                "ban both ids in generation, or choose ids that do not occur"
            ),
        )


def _rows_and_actions(source: Tensor, vocabulary: int, value_token_ids: Any, action_rows: Any, actions: Any) -> tuple[int, int]:
    pair = value_token_pair(value_token_ids, vocabulary)
    integers("action_rows", action_rows, None, source.device, "action")
    integers("actions", actions, action_rows.shape[0], source.device, "action row")
    if vocabulary == 2 and action_rows.shape[0]:
        raise ValueError("value_token_ids ban the whole vocabulary: V is 2, no token is left for the policy")
    return pair


def _value_rows(kind: str, rows: Any, old: Any, targets: Any, device: torch.device) -> None:
    if rows is None:
        for name, x in ((f"{kind}_old", old), (f"{kind}_targets", targets)):
            if x is not None:
                raise ValueError(f"{name} is given without {kind}_rows: give the rows, or leave it out")
        return
    for name, x in ((f"{kind}_old", old), (f"{kind}_targets", targets)):
        if x is None:
            raise ValueError(f"{kind}_rows need {kind}_old and {kind}_targets, [M] in reward units; {name} is None")
    integers(f"{kind}_rows", rows, None, device, "turn")
    floats(f"{kind}_old", old, rows.shape[0], device, f"entry of {kind}_rows")
    floats(f"{kind}_targets", targets, rows.shape[0], device, f"entry of {kind}_rows")


def _normaliser(name: str, value: Any, count: int) -> None:
    if value is None:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a scalar tensor, got shape {tuple(value.shape)}")
        return
    number(name, value)
    if not (0 < value < math.inf or (value == 0 and count == 0)):
        raise ValueError(f"{name} must be > 0 and finite (the whole batch's count), got {value!r}")


def fused_loss(
    *,
    logits: Any,
    hidden: Any,
    lm_head: Any,
    lm_head_bias: Any,
    value_token_ids: Any,
    action_rows: Any,
    actions: Any,
    old_logprobs: Any,
    advantages: Any,
    v_rows: Any,
    v_old: Any,
    v_targets: Any,
    q_rows: Any,
    q_old: Any,
    q_targets: Any,
    ref_logprobs: Any,
    token_weights: Any,
    num_tokens: Any,
    num_turns: Any,
    config: Any,
    impl: Any,
    inplace: bool,
    check: bool,
) -> None:
    backends.check_impl(impl)
    if any(not hasattr(config, name) for name in ("clip_low", "r_max", "readout")):
        raise ValueError(f"config must be a sapo_fast.LossConfig, got {type(config).__name__}")
    source, vocabulary = _source(logits, hidden, lm_head, lm_head_bias)
    if inplace and logits is None:
        raise ValueError("inplace=True reuses the logits' memory and goes with logits; from hidden states leave it out")
    pair = _rows_and_actions(source, vocabulary, value_token_ids, action_rows, actions)
    n, device = action_rows.shape[0], source.device
    if old_logprobs is not None:
        floats("old_logprobs", old_logprobs, n, device, "action row")
    floats("advantages", advantages, n, device, "action row")
    if ref_logprobs is not None:
        floats("ref_logprobs", ref_logprobs, n, device, "action row")
    elif config.kl_coef > 0 and n:
        raise ValueError(f"kl_coef = {config.kl_coef} needs ref_logprobs, [N] of the reference model: give them, or LossConfig(kl_coef=0)")
    if token_weights is not None:
        floats("token_weights", token_weights, n, device, "action row")
    _value_rows("v", v_rows, v_old, v_targets, device)
    _value_rows("q", q_rows, q_old, q_targets, device)
    _normaliser("num_tokens", num_tokens, n)
    _normaliser("num_turns", num_turns, sum(x.shape[0] for x in (v_rows, q_rows) if x is not None))
    if not check:
        return
    data, of = Data(), "logits" if logits is not None else "hidden"
    _actions(data, action_rows, actions, pair, source, of, vocabulary)
    for name, rows in (("v_rows", v_rows), ("q_rows", q_rows)):
        if rows is not None:
            data.inside(name, rows, source.shape[0], of)
    data.logprobs("old_logprobs", old_logprobs)
    data.finite("advantages", advantages)
    data.finite("token_weights", token_weights)
    if config.kl_coef > 0:
        data.logprobs("ref_logprobs", ref_logprobs)
    for name, x in (("v_old", v_old), ("v_targets", v_targets), ("q_old", q_old), ("q_targets", q_targets)):
        data.finite(name, x)
    data.settle()


def finite_loss(loss: Tensor, named: tuple[tuple[str, str, Tensor, Tensor], ...]) -> None:
    """ValueError if the loss came out infinite or NaN, with the first row at fault.

    ``named``: (what, name of its rows, rows [n], numbers [n] of these rows).
    """
    if torch.compiler.is_compiling():
        return
    value = float(loss.detach())
    if math.isfinite(value):
        return
    for what, name, rows, numbers in named:
        bad = (~numbers.detach().isfinite()).nonzero()
        if len(bad):
            i = int(bad[0, 0])
            raise ValueError(
                f"the loss is {value}: the {what} of {name}[{i}] (row {int(rows[i])}) is {float(numbers[i])}, and {len(bad)} of {len(rows)} are "
                "not finite; the hidden states or logits of these rows, or the LM head, hold NaN or infinity"
            )
    raise ValueError(
        f"the loss is {value}, though the numbers of every row are finite: advantages, value targets or old values are too large"
    )


def token_logprobs(
    *,
    logits: Any,
    hidden: Any,
    lm_head: Any,
    lm_head_bias: Any,
    value_token_ids: Any,
    action_rows: Any,
    actions: Any,
    temperature: Any,
    impl: Any,
    check: bool,
) -> None:
    backends.check_impl(impl)
    positive("temperature", temperature)
    source, vocabulary = _source(logits, hidden, lm_head, lm_head_bias)
    pair = _rows_and_actions(source, vocabulary, value_token_ids, action_rows, actions)
    if check:
        data = Data()
        _actions(data, action_rows, actions, pair, source, "logits" if logits is not None else "hidden", vocabulary)
        data.settle()


def read_values(
    *,
    logits: Any,
    hidden: Any,
    lm_head: Any,
    lm_head_bias: Any,
    value_token_ids: Any,
    rows: Any,
    r_max: Any,
    tau_v: Any,
    readout: Any,
    check: bool,
) -> None:
    positive("r_max", r_max)
    positive("tau_v", tau_v)
    readout_name(readout)
    source, vocabulary = _source(logits, hidden, lm_head, lm_head_bias)
    value_token_pair(value_token_ids, vocabulary)
    integers("rows", rows, None, source.device, "turn")
    if check:
        data = Data()
        data.inside("rows", rows, source.shape[0], "logits" if logits is not None else "hidden")
        data.settle()
