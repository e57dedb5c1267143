"""Generation with a Hugging Face model in this process: own batched loop, key-value cache kept between turns, exact log-probs.

Every live episode owns a slot of the cache, so a turn costs its new tokens only; the tokens of all episodes go through the model
in one packed sequence without padding, and a response that ends leaves the batch at once.

Legend: n requests, N new tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sapo_fast.models.packed import check_context, lm_head_of, prepare, run_decoder
from sapo_fast.rollout.engine import Completion, Request, Sampling, check_requests
from sapo_fast.rollout.kv_cache import ArenaLayout, KVArena
from sapo_fast.rollout.sampler import draw, uniforms

_PREFILL_TOKENS = 8192  # new tokens of one forward, at most (a longer prompt goes alone)
_SHARE_TOKENS = 64  # a prefix common to the prompts is copied between slots if that saves at least so many tokens


@dataclass
class EngineStats:
    """Counters since the engine was made. Seconds are wall-clock."""

    prompt_tokens: int = 0  # of all prompts, as given
    cached_tokens: int = 0  # of those, not computed again: held from an earlier turn or copied from another episode
    generated_tokens: int = 0
    evictions: int = 0  # episodes whose cache had to make room for others
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class HFEngine:
    """A generation engine (see ``rollout.engine``) over a transformers causal LM, on the model's own device and in its dtype.

    model: a causal LM that ``models.packed`` can run; its parameters are read at every call, so training it in place needs no
    copying: call ``weights_changed()`` afterwards. value_token_ids: (w+, w-), never sampled and outside every log-prob.
    max_context_tokens: prompt + response never exceed it. max_batch: requests in flight at once; more are taken in turns.
    max_slots: episodes whose cache is kept (default: max_batch); beyond that the longest unused makes room.

    A response is a function of weights, prompt, seed and sampling alone, whatever shares the batch, up to floating-point
    rounding: matrix products round differently for other batch sizes, which moves a token only where the drawn number falls
    within about 1e-6 of a boundary between two ids.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value_token_ids: tuple[int, int],
        max_context_tokens: int,
        max_batch: int = 256,
        max_slots: int | None = None,
    ) -> None:
        if max_context_tokens < 2 or max_batch < 1:
            raise ValueError(
                "max_context_tokens must be at least 2 (a prompt and a response) and max_batch at least 1; "
                f"got {max_context_tokens} and {max_batch}"
            )
        weight, _ = lm_head_of(model)
        plus, minus = value_token_ids
        if plus == minus or not all(0 <= i < weight.shape[0] for i in (plus, minus)):
            raise ValueError(f"value_token_ids must be two different rows of the LM head, [0, {weight.shape[0]}); got {value_token_ids}")
        slots = max_batch if max_slots is None else max_slots
        if slots < max_batch:
            raise ValueError(f"max_slots must be at least max_batch = {max_batch}: every request in flight needs a slot; got {max_slots}")
        check_context(model, max_context_tokens)
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and max_context_tokens > limit:
            raise ValueError(f"max_context_tokens must be at most the model's max_position_embeddings = {limit}; got {max_context_tokens}")
        self.max_context_tokens = max_context_tokens
        self.stats = EngineStats()
        self._model = model
        self._banned = (plus, minus)
        self._max_batch = max_batch
        self._arena = KVArena(slots, max_context_tokens)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Responses in the order of the requests; log-probs at the sampling temperature (greedy: at temperature 1) without w+ and w-.

        ValueError: a prompt that is empty, fills the context or holds w+, w- or unknown ids; two requests with one key; sampling
        out of range. FloatingPointError: the model's logits are not finite.
        """
        vocabulary = lm_head_of(self._model)[0].shape[0]
        prompts = check_requests(requests, sampling, vocabulary=vocabulary, banned=self._banned, max_context_tokens=self.max_context_tokens)
        decoder, training = prepare(self._model), self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                done: list[Completion] = []
                for i in range(0, len(requests), self._max_batch):
                    done += self._batch(decoder, requests[i : i + self._max_batch], prompts[i : i + self._max_batch], sampling)
                return done
        finally:
            self._model.train(training)
            self.stats.evictions = self._arena.evictions

    def release(self, keys: Iterable[int]) -> None:
        """Free the slots of these episodes."""
        self._arena.release(keys)

    def weights_changed(self) -> None:
        """Drop every cached key and value."""
        self._arena.clear()

    def _batch(self, decoder: nn.Module, requests: Sequence[Request], prompts: list[np.ndarray], sampling: Sampling) -> list[Completion]:
        began = time.perf_counter()
        weight, bias = lm_head_of(self._model)
        banned = torch.tensor(self._banned, device=weight.device)
        seeds = np.array([r.seed & 0xFFFFFFFFFFFFFFFF for r in requests], dtype=np.uint64)
        lengths = np.array([len(p) for p in prompts])
        budgets = np.minimum(sampling.max_new_tokens, self.max_context_tokens - lengths)
        stops = np.array(sorted(sampling.stop_ids), dtype=np.int64)
        slots = self._arena.acquire([r.key for r in requests])
        self._arena.reserve(int((lengths + budgets).max()))

        active = np.argsort(slots)  # slots side by side are read where they lie
        hidden = self._prefill(decoder, prompts, slots)[torch.from_numpy(active).to(weight.device)]
        prefilled = time.perf_counter()
        tokens = np.zeros((len(requests), int(budgets.max())), dtype=np.int64)
        logprobs = np.zeros(tokens.shape, dtype=np.float64)
        counts = np.zeros(len(requests), dtype=np.int64)
        for index in range(tokens.shape[1]):
            ids, lps = draw(F.linear(hidden, weight, bias), banned, uniforms(seeds[active], index), sampling.temperature)
            drawn = ids.cpu().numpy()
            tokens[active, index] = drawn
            logprobs[active, index] = lps.cpu().numpy()
            counts[active] = index + 1
            going = np.flatnonzero(~np.isin(drawn, stops) & (index + 1 < budgets[active]))
            if not len(going):
                break
            if len(going) < len(active):
                active = active[going]
                ids = ids[torch.from_numpy(going).to(ids.device)]
            ones = np.ones(len(active), dtype=np.int64)
            layout = ArenaLayout(self._arena, slots[active], lengths[active] + index, ones, weight.dtype, weight.device)
            positions = torch.from_numpy(layout.positions).to(weight.device)
            hidden = run_decoder(decoder, ids[None], positions[None], layout)[0]

        if not np.isfinite(logprobs).all():
            self._arena.discard()
            bad = requests[int(np.flatnonzero(~np.isfinite(logprobs).all(1))[0])].key
            raise FloatingPointError(f"request {bad}: the model's logits are not finite; its weights have diverged")
        done = []
        for i, count in enumerate(counts.tolist()):
            self._arena.hold(int(slots[i]), len(prompts[i]), tokens[i, : count - 1])  # the last token has not been run
            response = tokens[i, :count].tolist()
            reason = "stop" if response[-1] in sampling.stop_ids else "length"
            done.append(Completion(response, logprobs[i, :count].tolist(), reason))
        self.stats.generated_tokens += int(counts.sum())
        self.stats.prefill_seconds += prefilled - began
        self.stats.decode_seconds += time.perf_counter() - prefilled
        return done

    def _prefill(self, decoder: nn.Module, prompts: list[np.ndarray], slots: np.ndarray) -> Tensor:
        """Run what the slots do not hold of the prompts: the hidden states of the prompts' last tokens, [n, H]."""
        starts = np.array([self._arena.common_prefix(slot, prompt) for slot, prompt in zip(slots.tolist(), prompts, strict=True)])
        self._share_prefix(decoder, prompts, slots, starts)
        lengths = np.array([len(p) for p in prompts])
        self.stats.prompt_tokens += int(lengths.sum())
        self.stats.cached_tokens += int(starts.sum())
        counts = lengths - starts
        order = np.lexsort((slots, counts))
        parts, begin = [], 0
        while begin < len(order):
            fitting = int(np.searchsorted(np.cumsum(counts[order[begin:]]), _PREFILL_TOKENS, side="right"))
            rows = order[begin : begin + max(1, fitting)]
            parts.append(self._run(decoder, [prompts[i] for i in rows], slots[rows], starts[rows], counts[rows]))
            begin += len(rows)
        hidden = torch.cat(parts)
        return hidden[torch.from_numpy(np.argsort(order)).to(hidden.device)]

    def _share_prefix(self, decoder: nn.Module, prompts: list[np.ndarray], slots: np.ndarray, starts: np.ndarray) -> None:
        """Copy a prefix that all prompts share (a system prompt) into the slots that lack it; ``starts`` is brought up to date."""
        first = prompts[0]
        shared = min(len(p) for p in prompts) - 1
        for prompt in prompts[1:]:
            differs = prompt[:shared] != first[:shared]
            shared = int(differs.argmax()) if differs.any() else shared
        lacking = np.flatnonzero(starts < shared)
        donor = int(starts.argmax())
        if int((shared - starts[lacking]).sum()) - max(0, shared - int(starts[donor])) < _SHARE_TOKENS:
            return
        if starts[donor] < shared:
            self._run(decoder, [first[:shared]], slots[[donor]], starts[[donor]], np.array([shared - starts[donor]]))
        targets = lacking[lacking != donor]
        self._arena.copy_prefix(int(slots[donor]), slots[targets], shared)
        starts[lacking] = shared

    def _run(self, decoder: nn.Module, prompts: list[np.ndarray], slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> Tensor:
        """Run counts[i] tokens of each prompt from starts[i] on: hidden states of the last ones, [n, H]."""
        weight, _ = lm_head_of(self._model)
        self._arena.lengths[slots] = starts  # an interruption must not leave a slot that claims what is being overwritten
        ids = np.concatenate([p[s : s + c] for p, s, c in zip(prompts, starts, counts, strict=True)])
        layout = ArenaLayout(self._arena, slots, starts, counts, weight.dtype, weight.device)
        tokens, positions = (torch.from_numpy(x).to(weight.device)[None] for x in (ids, layout.positions))
        hidden = run_decoder(decoder, tokens, positions, layout)[0]
        for prompt, slot, start, count in zip(prompts, slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
            self._arena.hold(slot, start, prompt[start : start + count])
        return hidden[torch.from_numpy(layout.last).to(hidden.device)]
