"""What a generation engine is: token ids in, token ids and their log-probs out.

An engine knows a model and nothing of environments, turns or losses. ``hf`` (transformers), ``scripted`` (fixed ids) and ``vllm`` obey this protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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


class Engine(Protocol):
    """A source of responses."""

    max_context_tokens: int  # prompt + response never exceed it

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Responses in the order of the requests."""

    def release(self, keys: Iterable[int]) -> None:
        """These episodes are over: forget what was kept for them."""

    def weights_changed(self) -> None:
        """The model's weights moved (in place, or were copied in): whatever was computed under the old ones must not be used again."""
