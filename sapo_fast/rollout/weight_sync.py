"""Carry the trainer's weights into an engine that holds its own, and prove after every time that they arrived.

The proof has three parts, each of which sees what the others cannot:

- *sums of bits*: every parameter the engine holds, against the trainer's. Exact, so a sync that did not happen is seen however little
  the weights moved. Blind to copies: an engine may hold the new parameter and compute with a packed copy of the old one.
- *canary*: a few tokens that the engine samples from fixed prompts, scored by the trainer: log-probs, and the difference of the value
  logits. Sees what is really computed with. Blind to changes below its tolerance.
- *cached tokens*: straight after a sync the canary, which ran just before it, must find nothing in the prefix cache.

Because a canary is blind to small steps, ``rehearse`` is run once at the start: it moves some of the trainer's weights by 10 %, sees the
proof fail, syncs, sees it pass, and puts the weights back. An engine that computes with copies is found there, not after a thousand steps.

Legend: n response tokens, H hidden, V vocabulary (LM-head rows).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapo_fast.models.packed import decoder_of, lm_head_of, packed_hidden

#: Largest allowed difference of log-probs and value logits between engine and trainer, by the engine's dtype.
TOLERANCE = {"float32": 5e-4, "bfloat16": 0.25, "float16": 0.05}
CANARY_TOKENS = 8
_CANARY_PROMPT = 80  # tokens: more than two blocks of any engine's prefix cache (16 or 32), so that a stale cache would be hit
_REHEARSAL = 1.1  # what some weights are multiplied by


class WeightMismatch(RuntimeError):
    """The engine does not compute with the trainer's weights."""


@dataclass
class CanaryAnswer:
    """What an engine answered to a canary prompt."""

    token_ids: list[int]
    logprobs: list[float]  # at temperature 1, without w+ and w-
    v_logit: float  # z[w+] - z[w-] at the prompt's last token
    cached_tokens: int  # of the prompt, found in the prefix cache


class SyncTarget(Protocol):
    """What an engine offers for its weights to be replaced and proved."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy (Hugging Face name, tensor) pairs in."""

    def reset_prefix_cache(self) -> bool:
        """Forget all keys and values; False: something still held them."""

    def bit_sums(self) -> dict[str, int]:
        """``bit_sum`` of every parameter, without padding rows."""

    def weight_groups(self) -> dict[str, list[str]]:
        """Which of the checkpoint's modules lie in one of the engine's: {"qkv_proj": ["q_proj", "k_proj", "v_proj"], ...}."""

    def canary(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[CanaryAnswer]:
        """Sample ``tokens`` ids after each prompt at temperature 1."""


@dataclass
class SyncReport:
    """One sync and its proof."""

    seconds: float  # of both
    proof_seconds: float
    canary_gap: float  # largest difference seen of log-probs and value logits


def bit_sum(tensor: Tensor) -> int:
    """Sum of a tensor's bit patterns as integers, modulo 2^64: exact, and additive over any way of cutting the tensor in parts."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(bits).sum(dtype=torch.int64))


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of every weight, tied ones once. LoRA adapters (peft) are merged into the tensors, not into the model."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        if name.endswith(".base_layer.weight"):
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            if not layer.merged:
                with torch.no_grad():
                    weight = sum((layer.get_delta_weight(adapter) for adapter in layer.active_adapters), weight).to(weight.dtype)
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), weight


class WeightSync:
    """Keeps an engine on the weights of ``model``.

    value_token_ids: (w+, w-). dtype: of the engine's parameters. context: the longest prompt + response that the engine takes. tolerance:
    of the canary; None: by dtype (``TOLERANCE``). ValueError: no tolerance known.
    """

    def __init__(
        self,
        model: nn.Module,
        target: SyncTarget,
        *,
        value_token_ids: tuple[int, int],
        dtype: torch.dtype,
        context: int,
        tolerance: float | None = None,
    ) -> None:
        self.model, self.target, self.dtype, self.value_token_ids = model, target, dtype, value_token_ids
        self.tolerance = TOLERANCE.get(str(dtype).removeprefix("torch.")) if tolerance is None else tolerance
        if self.tolerance is None:
            raise ValueError(f"no tolerance is known for {dtype}; give one")
        self.syncs = 0
        self._synced: tuple[int, ...] | None = None
        vocabulary = lm_head_of(model)[0].shape[0]
        allowed = np.setdiff1d(np.arange(vocabulary), value_token_ids)
        length = min(_CANARY_PROMPT, context - CANARY_TOKENS)
        rng = np.random.default_rng(0)
        self._prompts = [rng.choice(allowed, size=length).tolist() for _ in range(2)]

    # ---- sync -----------------------------------------------------------------------------------------------------------------------

    def sync(self) -> SyncReport:
        """Copy the model's weights over, reset the prefix cache, and prove it. WeightMismatch: the proof failed."""
        began = time.perf_counter()
        if self.syncs:
            with contextlib.suppress(FloatingPointError):  # old weights that had diverged are of no interest
                self.target.canary(self._prompts, 1)  # the cache now holds these prompts under the old weights
        self.target.load_weights((name, weight.to(self.dtype)) for name, weight in named_weights(self.model))
        if not self.target.reset_prefix_cache():
            raise WeightMismatch(
                "the engine kept its prefix cache, because requests are still in progress; finish or abort them before a sync"
            )
        loaded = time.perf_counter()
        gap = self.prove()
        self.syncs += 1
        self._synced = self._versions()
        ended = time.perf_counter()
        return SyncReport(ended - began, ended - loaded, gap)

    def moved(self) -> bool:
        """Have the model's weights been written to since the last sync (as far as torch's version counters tell)?"""
        return self._synced != self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(p._version for p in self.model.parameters())

    # ---- proof ----------------------------------------------------------------------------------------------------------------------

    def prove(self, fresh: bool = True) -> float:
        """WeightMismatch unless the engine holds and computes with the model's weights. ``fresh``: the prefix cache has just been reset.

        Returns the largest difference of the canary's log-probs and value logits.
        """
        self._compare_sums()
        answers = self.target.canary(self._prompts, CANARY_TOKENS)
        if fresh and (cached := max(answer.cached_tokens for answer in answers)):
            raise WeightMismatch(
                f"the engine found {cached} tokens of the canary prompt in its prefix cache straight after a sync: the cache was not reset, "
                "and what it holds belongs to older weights"
            )
        gap = max(self._gap(prompt, answer) for prompt, answer in zip(self._prompts, answers, strict=True))
        if not gap <= self.tolerance:
            raise WeightMismatch(
                f"the engine's parameters are the trainer's, bit for bit, yet its log-probs differ by {gap:.3g} (allowed: {self.tolerance:.3g}): "
                "it computes with something else, such as a packed copy of a tied LM head made at start, or cached keys and values of older weights"
            )
        return gap

    def _compare_sums(self) -> None:
        held, groups = self.target.bit_sums(), self.target.weight_groups()
        whole = {part: name for name, parts in groups.items() for part in parts}
        expected: dict[str, int] = {}
        for name, weight in named_weights(self.model):
            *path, module, kind = name.split(".")
            where = ".".join((*path, whole.get(module, module), kind))
            expected[where] = _wrap(expected.get(where, 0) + bit_sum(weight.to(self.dtype)))
        if "lm_head.weight" in held and "lm_head.weight" not in expected:  # tied in the trainer, a second copy in the engine
            expected["lm_head.weight"] = bit_sum(lm_head_of(self.model)[0].to(self.dtype))
        wrong = sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))
        if wrong:
            shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise WeightMismatch(
                f"{len(wrong)} of the engine's {len(held)} parameters are not the trainer's: {shown}; the weights were not synced"
            )

    @torch.no_grad()
    def _gap(self, prompt: Sequence[int], answer: CanaryAnswer) -> float:
        """Largest difference between the engine's canary and the trainer's own pass over the same ids."""
        weight, bias = lm_head_of(self.model)
        ids = torch.tensor([*prompt, *answer.token_ids], device=weight.device)
        training = self.model.training
        self.model.eval()
        hidden = packed_hidden(self.model, ids, torch.arange(len(ids), device=ids.device), [0, len(ids)], len(ids))
        self.model.train(training)
        logits = F.linear(hidden[len(prompt) - 1 : -1], weight, bias).double()  # [n, V]
        plus, minus = self.value_token_ids
        v_gap = abs((logits[0, plus] - logits[0, minus]).item() - answer.v_logit)
        logits[:, [plus, minus]] = -torch.inf
        scored = logits.log_softmax(1).gather(1, ids[len(prompt) :, None])[:, 0].cpu()
        gap = (scored - torch.tensor(answer.logprobs, dtype=torch.float64)).abs().max().item()
        return gap if gap != gap else max(gap, v_gap)

    # ---- rehearsal ------------------------------------------------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Prove once that a sync reaches whatever the engine computes with: see the module's description. Ends with a sync of the model as it is.

        WeightMismatch: it does not. Holds a copy of the moved weights (embeddings, head, final norm, one layer) for the time.
        """
        self.sync()
        moved = self._rehearsal_weights()
        kept = [p.detach().clone() for p in moved]
        try:
            with torch.no_grad():
                torch._foreach_mul_(moved, _REHEARSAL)
            answers = self.target.canary(self._prompts, CANARY_TOKENS)
            gap = max(self._gap(prompt, answer) for prompt, answer in zip(self._prompts, answers, strict=True))
            if not gap > 2 * self.tolerance:
                raise WeightMismatch(
                    f"the proof is blind: weights moved by 10 % change the canary's log-probs by {gap:.3g} only (tolerance: {self.tolerance:.3g})"
                )
            self.sync()
        finally:
            with torch.no_grad():
                torch._foreach_copy_(moved, kept)
        self.sync()

    def _rehearsal_weights(self) -> list[Tensor]:
        model = self.model
        layers = decoder_of(model).layers
        inside = {id(p) for layer in itertools.islice(layers, len(layers) - 1) for p in layer.parameters()}
        return [p for p in model.parameters() if id(p) not in inside]


def _wrap(value: int) -> int:
    """Into the range of int64, modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
