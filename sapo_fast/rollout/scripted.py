"""An engine that plays given responses and computes nothing: for tests, and for replaying demonstrations through the episode loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sapo_fast.rollout.engine import Completion, Request, Sampling


class ScriptedEngine:
    """Plays ``script``: a list of responses (token ids), played in order by every episode, or a function (request, turn) -> token ids.

    ``turn`` counts the requests of a key from 0. ``logprobs``: a function (request, turn) -> one number a token; None: zeros.
    Responses are cut at ``max_new_tokens``. ``requests`` keeps every request seen. ValueError when an episode outlives a list, or
    a response is empty.
    """

    def __init__(
        self,
        script: Sequence[Sequence[int]] | Callable[[Request, int], Sequence[int]],
        *,
        max_context_tokens: int = 1 << 20,
        logprobs: Callable[[Request, int], Sequence[float]] | None = None,
    ) -> None:
        self.max_context_tokens = max_context_tokens
        self.requests: list[Request] = []
        self._script = script
        self._logprobs = logprobs
        self._turns: dict[int, int] = {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """The scripted responses, in the order of the requests."""
        return [self._play(request, sampling) for request in requests]

    def release(self, keys: Iterable[int]) -> None:
        """Forget how far these episodes were."""
        for key in keys:
            self._turns.pop(key, None)

    def weights_changed(self) -> None:
        """Nothing depends on weights."""

    def _play(self, request: Request, sampling: Sampling) -> Completion:
        turn = self._turns.get(request.key, 0)
        self._turns[request.key] = turn + 1
        self.requests.append(request)
        if callable(self._script):
            ids = list(self._script(request, turn))
        elif turn < len(self._script):
            ids = list(self._script[turn])
        else:
            raise ValueError(
                f"the script has {len(self._script)} responses, but episode {request.key} is at turn {turn + 1}; make it longer"
            )
        if not ids:
            raise ValueError(f"the response of turn {turn + 1} is empty; a response has at least one token")
        ids = ids[: min(sampling.max_new_tokens, self.max_context_tokens - len(request.prompt_ids))]
        logprobs = [0.0] * len(ids) if self._logprobs is None else [float(x) for x in self._logprobs(request, turn)][: len(ids)]
        if len(logprobs) != len(ids):
            raise ValueError(f"turn {turn + 1} has {len(ids)} tokens but {len(logprobs)} log-probs; give one a token")
        return Completion(ids, logprobs, "stop" if ids[-1] in sampling.stop_ids else "length")
