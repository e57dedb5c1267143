"""What a generation engine is: token ids in, token ids and their log-probs out.

An engine knows a model and nothing of environments, turns or losses. ``hf`` (transformers), ``scripted`` (fixed ids) and ``vllm`` obey this protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How to sample. The value tokens are banned by the engine itself, always."""

    temperature: float = 1.0  # 0: greedy
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()  # a sampled stop id ends the response and belongs to it


@dataclass(frozen=True)
class Request:
    """One response wanted. ``key`` names the live episode, so that the engine can keep what it computed for it between turns."""

    key: int
    prompt_ids: Sequence[int]
    seed: int  # the response is a function of (weights, prompt, seed, sampling) alone, whatever else is in the batch


@dataclass
class Completion:
    """One response: ids, their log-probs at the sampling temperature on the support without the value tokens, and why it ended."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    v_logit: float | None = None  # z[w+] - z[w-] at the prompt's last token, where the engine reports it


class EngineDied(RuntimeError):
    """The engine can answer no more. One that has ``restart()`` can be started again, with the model's current weights."""


class Engine(Protocol):
    """A source of responses."""

    max_context_tokens: int  # prompt + response never exceed it

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Responses in the order of the requests."""

    def release(self, keys: Iterable[int]) -> None:
        """These episodes are over: forget what was kept for them."""

    def weights_changed(self) -> None:
        """The model's weights moved (in place, or were copied in): whatever was computed under the old ones must not be used again."""


class StreamingEngine(Engine, Protocol):
    """An engine that takes requests while others are in progress and hands each response over as it ends."""

    def submit(self, request: Request, sampling: Sampling) -> None:
        """Begin a response; ``key`` must not be one in progress. ValueError: the request is unusable."""

    def poll(self, timeout: float) -> list[tuple[int, Completion]]:
        """Work, or wait up to ``timeout`` seconds where others work: (key, response) of those that ended. EngineDied: see there."""

    def restart(self) -> None:
        """Begin anew after EngineDied, with the model's current weights; requests in progress are forgotten. EngineDied: in vain."""


def check_requests(
    requests: Sequence[Request], sampling: Sampling, *, vocabulary: int, banned: tuple[int, int], max_context_tokens: int
) -> list[np.ndarray]:
    """The prompts as arrays, or ValueError: a prompt that is empty, fills the context or holds w+, w- or unknown ids; two requests
    with one key; sampling out of range."""
    if not (0.0 <= sampling.temperature < float("inf")):
        raise ValueError(f"temperature must be >= 0 and finite (0: greedy); got {sampling.temperature}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {sampling.max_new_tokens}")
    if set(sampling.stop_ids) & set(banned):
        raise ValueError(f"stop_ids {sampling.stop_ids} hold a value token {banned}, which is never sampled")
    if len({r.key for r in requests}) != len(requests):
        raise ValueError("two requests bear the same key; a key names one live episode, with one request at a time")
    prompts = [np.asarray(r.prompt_ids, dtype=np.int64) for r in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        if not 0 < len(prompt) < max_context_tokens:
            raise ValueError(
                f"request {request.key}: the prompt has {len(prompt)} tokens; it must have at least 1 and fewer than "
                f"max_context_tokens = {max_context_tokens}, to leave room for a response"
            )
    if prompts:
        every = np.concatenate(prompts)
        if every.min() < 0 or every.max() >= vocabulary:
            raise ValueError(f"prompt ids must be in [0, {vocabulary}), the model's vocabulary; got {every.min()}..{every.max()}")
        if ((every == banned[0]) | (every == banned[1])).any():
            raise ValueError(f"a prompt holds a value token {banned}; choose ids that the tokenizer never makes of a text")
    return prompts
