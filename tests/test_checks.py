"""Bad input to the loss and the log-probabilities: a ValueError before any work, naming the argument, the rule, the value and the fix."""

import math

import pytest
import torch
from helpers_ops import as_logits, cast, problem

from sapo_fast import LossConfig, fused_loss, token_logprobs


def replaced(x, i, value):
    x = x.clone()
    x[i] = value
    return x


class Sharded(torch.Tensor):
    """What a DTensor looks like from outside."""

    placements = ("Shard(0)",)

    def full_tensor(self):
        raise AssertionError("never called")


P = cast(as_logits(problem(1)), torch.float32)
P["value_token_ids"] = (35, 36)
P["actions"] = P["actions"].clamp(max=34)
H = cast(problem(1), torch.float32)
H["value_token_ids"], H["actions"] = (35, 36), P["actions"]

BAD = {
    "both forms": ({**H, "logits": P["logits"]}, "got both of logits and hidden"),
    "neither form": ({k: v for k, v in P.items() if k != "logits"}, "got neither of logits and hidden"),
    "head with logits": ({**P, "lm_head": H["lm_head"]}, "lm_head goes with hidden"),
    "no head": ({**H, "lm_head": None}, "hidden needs lm_head"),
    "head width": ({**H, "lm_head": torch.zeros(37, 5)}, r"lm_head must be \[V, H\] with H = 6 as hidden, got \(37, 5\)"),
    "head type": ({**H, "lm_head": H["lm_head"].bfloat16()}, r"lm_head is torch.bfloat16, hidden is torch.float32.*lm_head.to"),
    "bias length": ({**H, "lm_head_bias": torch.zeros(36)}, "lm_head_bias must have one entry per row of lm_head: 37, got 36"),
    "bias type": ({**H, "lm_head_bias": torch.zeros(37).double()}, "lm_head_bias is torch.float64"),
    "ZeRO-3": ({**H, "lm_head": torch.empty(0)}, r"lm_head is empty.*deepspeed.zero.GatheredParameters\(\[lm_head\]\)"),
    "DTensor head": ({**H, "lm_head": H["lm_head"].as_subclass(Sharded)}, r"lm_head is a DTensor: pass lm_head.full_tensor\(\)"),
    "DTensor hidden": ({**H, "hidden": H["hidden"].as_subclass(Sharded)}, "hidden is a DTensor"),
    "DTensor logits": ({**P, "logits": P["logits"].as_subclass(Sharded)}, "logits are a DTensor"),
    "three dimensions": ({**P, "logits": P["logits"][None]}, r"logits must have 2 dimensions, got shape \(1, 17, 37\); reshape"),
    "integer logits": ({**P, "logits": P["logits"].long()}, "logits must be floating point"),
    "equal ids": ({**P, "value_token_ids": (36, 36)}, "w_plus and w_minus must differ, both are 36"),
    "id out of range": ({**P, "value_token_ids": (35, 37)}, r"w_minus = 37 is outside the vocabulary \[0, 37\)"),
    "row too large": (
        {**P, "action_rows": replaced(P["action_rows"], 3, 17)},
        r"action_rows\[3\] = 17 is out of range: logits has 17 rows",
    ),
    "row negative": ({**P, "action_rows": replaced(P["action_rows"], 3, -1)}, r"action_rows\[3\] = -1 is out of range"),
    "float rows": ({**P, "action_rows": P["action_rows"].float()}, "action_rows must be integers"),
    "hidden row": ({**H, "v_rows": replaced(H["v_rows"], 0, 99)}, r"v_rows\[0\] = 99 is out of range: hidden has 17 rows \(0 to 16\)"),
    "q row": ({**P, "q_rows": replaced(P["q_rows"], 1, -5)}, r"q_rows\[1\] = -5 is out of range"),
    "action w+": ({**P, "actions": replaced(P["actions"], 2, 35)}, rf"actions\[2\] \(row {int(P['action_rows'][2])}\) is 35, .*w_plus"),
    "action w-": ({**P, "actions": replaced(P["actions"], 10, 36)}, r"actions\[10\].*is 36, the value token w_minus.*ban both ids"),
    "action too large": ({**P, "actions": replaced(P["actions"], 2, 37)}, r"actions\[2\] = 37 .* outside the vocabulary \[0, 37\)"),
    "action -100": ({**P, "actions": replaced(P["actions"], 2, -100)}, r"actions\[2\] = -100"),
    "actions length": ({**P, "actions": P["actions"][1:]}, "actions must have one entry per action row: 11, got 10"),
    "old length": ({**P, "old_logprobs": P["old_logprobs"][1:]}, "old_logprobs must have one entry per action row: 11, got 10"),
    "advantages length": ({**P, "advantages": torch.zeros(12)}, "advantages must have one entry"),
    "ref length": ({**P, "ref_logprobs": torch.zeros(12)}, "ref_logprobs must have one entry"),
    "weights length": ({**P, "token_weights": torch.zeros(12)}, "token_weights must have one entry"),
    "v_old length": ({**P, "v_old": torch.zeros(3)}, "v_old must have one entry per entry of v_rows: 4, got 3"),
    "q_targets length": ({**P, "q_targets": torch.zeros(5)}, "q_targets must have one entry"),
    "v without old": ({**P, "v_old": None}, "v_rows need v_old and v_targets, .*; v_old is None"),
    "q without targets": ({**P, "q_targets": None}, "q_targets is None"),
    "targets without rows": ({**P, "v_rows": None}, "v_old is given without v_rows"),
    "kl without ref": ({**P, "ref_logprobs": None}, r"kl_coef = 0.01 needs ref_logprobs.*LossConfig\(kl_coef=0\)"),
    "nan advantage": ({**P, "advantages": replaced(P["advantages"], 7, math.nan)}, r"advantages\[7\] = nan is not finite"),
    "inf old": ({**P, "old_logprobs": replaced(P["old_logprobs"], 1, -math.inf)}, r"old_logprobs\[1\] = -inf is not finite"),
    "old above 0": (
        {**P, "old_logprobs": replaced(P["old_logprobs"], 4, 0.5)},
        r"old_logprobs\[4\] = 0.5 is above 0: give log-probabilities .*neither probabilities nor their negatives",
    ),
    "ref above 0": ({**P, "ref_logprobs": replaced(P["ref_logprobs"], 0, 2.0)}, r"ref_logprobs\[0\] = 2.0 is above 0"),
    "nan ref": ({**P, "ref_logprobs": replaced(P["ref_logprobs"], 1, math.nan)}, r"ref_logprobs\[1\]"),
    "nan weight": ({**P, "token_weights": replaced(P["token_weights"], 1, math.nan)}, r"token_weights\[1\]"),
    "nan target": ({**P, "q_targets": replaced(P["q_targets"], 1, math.nan)}, r"q_targets\[1\]"),
    "inf old value": ({**P, "v_old": replaced(P["v_old"], 2, math.inf)}, r"v_old\[2\] = inf"),
    "other device": (
        {**P, "advantages": P["advantages"].to("meta")},
        r"advantages is on meta, the others are on cpu: move it with advantages.to",
    ),
    "head elsewhere": ({**H, "lm_head": H["lm_head"].to("meta")}, "lm_head is on meta"),
    "list": ({**P, "advantages": [0.0] * 11}, "advantages must be a torch.Tensor, got list"),
    "tokens 0": ({**P, "num_tokens": 0}, "num_tokens must be > 0"),
    "turns negative": ({**P, "num_turns": -1.0}, "num_turns must be > 0"),
    "tokens vector": ({**P, "num_tokens": torch.ones(2)}, "num_tokens must be a number or a scalar tensor"),
    "in place": ({**H, "inplace": True}, "inplace=True .* goes with logits"),
    "impl": ({**P, "impl": "fast"}, "impl must be one of auto, torch, cpp, triton, cuda; got 'fast'"),
    "config": ({**P, "config": {"clip_low": 0.2}}, "config must be a sapo_fast.LossConfig, got dict"),
}


@pytest.mark.parametrize(("arguments", "story"), BAD.values(), ids=BAD)
def test_fused_loss_refuses(arguments, story):
    with pytest.raises(ValueError, match=story):
        fused_loss(**arguments)


def test_a_log_probability_may_be_above_0_by_rounding():
    for name in ("old_logprobs", "ref_logprobs"):
        fused_loss(**{**P, name: replaced(P[name], 3, 1e-6)})
        fused_loss(**{**P, name: replaced(P[name], 3, 0.5)}, check=False)
    fused_loss(**{**P, "ref_logprobs": replaced(P["ref_logprobs"], 3, 0.5), "config": LossConfig(kl_coef=0.0)})  # not read at all


def test_the_same_arguments_unspoilt_pass():
    assert torch.isfinite(fused_loss(**P).loss) and torch.isfinite(fused_loss(**H).loss)


@pytest.mark.parametrize("name", ["both forms", "no head", "row too large", "action w+", "action -100", "impl", "DTensor head", "ZeRO-3"])
def test_token_logprobs_refuses(name):
    arguments, story = BAD[name]
    keys = ("logits", "hidden", "lm_head", "lm_head_bias", "value_token_ids", "action_rows", "actions", "impl")
    with pytest.raises(ValueError, match=story):
        token_logprobs(**{k: arguments[k] for k in keys if k in arguments})


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan, "hot"])
def test_temperature(temperature):
    with pytest.raises(ValueError, match="temperature must be"):
        token_logprobs(
            logits=P["logits"], value_token_ids=(35, 36), action_rows=P["action_rows"], actions=P["actions"], temperature=temperature
        )


@pytest.mark.parametrize(
    ("settings", "story"),
    [
        ({"clip_low": -0.1}, "clip_low must be >= 0 and finite, or None to switch it off; got -0.1"),
        ({"clip_high": math.inf}, "clip_high must be >= 0 and finite"),
        ({"v_clip": -1}, "v_clip must be >= 0"),
        ({"q_clip": "off"}, "q_clip must be a number, got 'off'"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1 and finite, or None to switch it off; got 1.0"),
        ({"v_coef": -0.5}, "v_coef must be >= 0"),
        ({"kl_coef": math.nan}, "kl_coef must be a number, got nan"),
        ({"entropy_coef": True}, "entropy_coef must be a number, got True"),
        ({"r_max": 0}, "r_max must be > 0"),
        ({"tau_v": 0.0}, "tau_v must be > 0"),
        ({"temperature": -1.0}, "temperature must be > 0"),
        ({"readout": "sigmoid"}, "readout must be one of linear, clip; got 'sigmoid'"),
    ],
)
def test_config_refuses(settings, story):
    with pytest.raises(ValueError, match=story):
        LossConfig(**settings)


def test_config_is_frozen_and_takes_none_for_every_clip():
    config = LossConfig(clip_low=None, clip_high=None, dual_clip=None, v_clip=None, q_clip=None)
    with pytest.raises(AttributeError):
        config.r_max = 1.0


def test_unchecked_calls_read_no_data(monkeypatch):
    """check=False must not look at tensors' contents: on a GPU that would wait for the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from sapo_fast import loss

    monkeypatch.setattr(loss, "is_one", lambda factor: False)  # a scalar in the CPU's own memory may be read

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
            return func(*args, **(kwargs or {}))

    for p in (P, H):
        leaf = "logits" if "logits" in p else "hidden"
        x = p[leaf].clone().requires_grad_()
        with NoReading():
            out = fused_loss(**{**p, leaf: x}, check=False)
            out.loss.backward()
            token_logprobs(
                **{k: p[k] for k in ("logits", "hidden", "lm_head", "lm_head_bias") if k in p},
                value_token_ids=(35, 36), action_rows=p["action_rows"], actions=p["actions"], check=False,
            )  # fmt: skip
