"""Play episodes without a lock-step barrier: every environment goes on as soon as its own answer is there.

The engine is kept full: it works on whatever responses are wanted while environments step beside it, and an episode that ended makes
room for the next at once. What comes out does not depend on the timing: a trajectory is a function of weights, task and seed, and they
are returned in the order of the tasks.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sapo_fast.envs.base import TaskSuite, TextEnv
from sapo_fast.records import Trajectory, Turn
from sapo_fast.rollout.engine import Completion, Engine, EngineDied, Request, Sampling, StreamingEngine
from sapo_fast.rollout.env_pool import EnvPool, EnvTimeout
from sapo_fast.rollout.episodes import EpisodeRunner, LiveEpisode, Reset, RolloutStats, Step, cached_tokens, reset_env, step_env
from sapo_fast.rollout.prompts import PromptBuilder
from sapo_fast.rollout.sampler import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("sapo_fast")
_POLL = 0.05  # seconds to wait where nothing can be computed
_Q_KEYS = itertools.count(-1, -1)  # requests that read Q are no episode's own; episodes' keys are not negative
_READ = Sampling(1.0, 1)  # one token, for the sake of the value logits before it


class BatchedStream:
    """A streaming engine over one that only takes batches: each ``poll`` generates what has been submitted since the last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_context_tokens = engine.max_context_tokens
        self._waiting: list[tuple[Request, Sampling]] = []

    def submit(self, request: Request, sampling: Sampling) -> None:
        self._waiting.append((request, sampling))

    def poll(self, timeout: float) -> list[tuple[int, Completion]]:
        taken, self._waiting = self._waiting, []
        done = []
        for sampling in dict.fromkeys(s for _, s in taken):
            requests = [request for request, s in taken if s == sampling]
            done += [(r.key, c) for r, c in zip(requests, self._engine.generate(requests, sampling), strict=True)]
        return done

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._engine.generate(requests, sampling)

    def release(self, keys: Iterable[int]) -> None:
        keys = set(keys)
        self._waiting = [(request, sampling) for request, sampling in self._waiting if request.key not in keys]
        self._engine.release(keys)

    def weights_changed(self) -> None:
        self._engine.weights_changed()

    def restart(self) -> None:
        raise EngineDied("this engine cannot be restarted")


@dataclass
class CollectorStats(RolloutStats):
    """``engine_seconds`` is the time in which the collector did nothing but wait for, or be, the engine."""

    retries: int = 0  # episodes played again after a crash or a time-out
    engine_restarts: int = 0


@dataclass
class _Attempt:
    """One try at one task."""

    index: int
    number: int  # 0: the first
    trajectory: Trajectory
    env: TextEnv
    live: LiveEpisode | None = None  # None until the environment was reset
    pending: dict[int, tuple[Request, Sampling, Turn | None]] = field(
        default_factory=dict
    )  # unanswered, by key; with the turn whose Q it reads
    over: bool = False  # ended; its last Q may still be on its way


class Collector(EpisodeRunner):
    """An EpisodeRunner (same arguments, same trajectories) that never waits for the slowest episode of a turn.

    engine: a streaming engine; any other is asked for whatever is wanted at the time. env_workers: threads for resets and steps; 0: in line,
    one at a time (best where they take microseconds; the order of everything is fixed then). env_timeout: seconds that a reset or step may
    take in a thread. retries: how often an episode that crashed or timed out is played again, from its seed. read_q: ask for the value
    logits after each response too, one token each (needs an engine that reports them). engine_restarts: how often in one ``run`` an engine
    that died is started again; its unanswered requests are repeated, which gives the same responses.
    """

    def __init__(
        self,
        suite: TaskSuite,
        engine: Engine,
        builder: PromptBuilder,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampling: Sampling,
        max_turns: int,
        reward_scale: float = 1.0,
        max_live: int = 64,
        env_workers: int = 0,
        env_timeout: float | None = None,
        retries: int = 1,
        read_q: bool = False,
        engine_restarts: int = 2,
    ) -> None:
        super().__init__(
            suite, engine, builder, tokenizer, sampling=sampling, max_turns=max_turns, reward_scale=reward_scale, max_live=max_live
        )
        if retries < 0 or engine_restarts < 0:
            raise ValueError(f"retries and engine_restarts must be at least 0; got {retries} and {engine_restarts}")
        self._stream: StreamingEngine = engine if hasattr(engine, "submit") else BatchedStream(engine)
        self._pool = EnvPool(env_workers, env_timeout)
        self._retries, self._read_q, self._restarts_allowed = retries, read_q, engine_restarts
        # Q is read one token beyond a response, so a response that fills the context needs an engine with room for one more.
        self._longest_prompt = getattr(engine, "max_prompt_tokens", engine.max_context_tokens - 1)

    def run(self, tasks: Sequence[tuple[str, int, int]], progress: str | None = None) -> list[Trajectory]:
        """Play one episode for each (task id, seed, group) and return the trajectories in that order.

        ValueError: a reward that is not finite. EngineDied: the engine died more often than it may, or could not be restarted.
        """
        from tqdm import tqdm

        self.stats = stats = CollectorStats()
        before, env_before = cached_tokens(self.engine), self._pool.seconds
        self._tasks, self._finished, self._attempts = tasks, {}, {}
        self._owner: dict[int, _Attempt] = {}  # of every request in progress, by its key
        started = 0
        bar = tqdm(total=len(tasks), desc=progress, disable=progress is None, unit="episode")
        try:
            while len(self._finished) < len(tasks):
                while started < len(tasks) and len(self._attempts) < self.max_live:
                    self._begin(started, 0)
                    started += 1
                idle = not self._owner  # nothing to compute: wait for an environment
                for index, found in self._pool.poll(_POLL if idle else 0.0):
                    self._environment_said(self._attempts[index], found)
                self._poll_engine()
                bar.update(len(self._finished) - bar.n)
        except BaseException:  # an interruption too: nothing half played is kept
            self._drop_everything()
            raise
        finally:
            bar.close()
        trajectories = [self._finished[i] for i in range(len(tasks))]
        stats.env_seconds = self._pool.seconds - env_before
        stats.reused_tokens = cached_tokens(self.engine) - before
        self._count(trajectories)
        return trajectories

    def close(self) -> None:
        """Close the idle environments and let the threads end."""
        self._pool.close()
        super().close()

    def _drop_everything(self) -> None:
        try:
            self._stream.release(list(self._owner))
        except Exception as error:  # a dead engine has nothing to release
            log.debug("releasing requests failed: %s", error)
        for index, attempt in self._attempts.items():
            if not any(attempt.env is env for env in self._idle):
                self._close_aside(attempt.env) if self._pool.busy(index) else self._close(attempt.env)
        self._pool.forget()
        self._attempts.clear()
        self._owner.clear()

    def _discard(self, env: TextEnv, error: Exception) -> None:
        self._close_aside(env) if isinstance(error, EnvTimeout) else self._close(env)

    def _close_aside(self, env: TextEnv) -> None:
        """Close an environment that a thread may still be in: closing may take for ever too."""
        threading.Thread(target=self._close, args=(env,), name="sapo_fast-close", daemon=True).start()

    # ---- one episode ----------------------------------------------------------------------------------------------------------------

    def _begin(self, index: int, number: int) -> None:
        task_id, seed, group = self._tasks[index]
        env = self._idle.pop() if self._idle else self.suite.make()
        self._attempts[index] = _Attempt(index, number, Trajectory(task_id=task_id, seed=seed, group=group), env)
        self._pool.submit(index, functools.partial(reset_env, env, task_id, seed))

    def _environment_said(self, attempt: _Attempt, found: Reset | Step | Exception) -> None:
        """A reset or a step ended."""
        if attempt.live is None:
            attempt.trajectory, attempt.live = self._admit(attempt.index, attempt.trajectory, attempt.env, found)
            end = attempt.trajectory.end if attempt.live is None else None
        else:
            end = self._observe(attempt.live, found)
        if end == "crashed" and attempt.number < self._retries:
            self._try_again(attempt)
        elif end is not None:
            attempt.over, attempt.trajectory.end = True, end
            if attempt.live is not None and end != "crashed":
                self._idle.append(attempt.env)
            self._finish_if_complete(attempt)
        else:
            live = attempt.live
            self._ask(
                attempt, Request(live.key, live.prompt_ids, derive_seed(live.trajectory.seed, len(live.trajectory.turns))), self.sampling
            )

    def _answered(self, attempt: _Attempt, request: Request, completion: Completion) -> None:
        """A response is there: on to the environment, and to Q beside it."""
        live = attempt.live
        command = self._respond(live, completion)
        if self._read_q:
            context = [*request.prompt_ids, *completion.token_ids]
            if len(context) <= self._longest_prompt:
                self._ask(attempt, Request(next(_Q_KEYS), context, seed=0), _READ, live.trajectory.turns[-1])
        self._pool.submit(attempt.index, functools.partial(step_env, attempt.env, command))

    def _try_again(self, attempt: _Attempt) -> None:
        for key in attempt.pending:
            del self._owner[key]
        self._stream.release([*attempt.pending, *([attempt.live.key] if attempt.live is not None else [])])
        self.stats.retries += 1
        self._uncount(attempt.trajectory)
        self._begin(attempt.index, attempt.number + 1)

    def _uncount(self, trajectory: Trajectory) -> None:
        """Take the turns of an attempt that is thrown away out of the counts of what was kept. Tokens were spent and stay."""
        self.stats.turns -= len(trajectory.turns)
        self.stats.invalid -= sum(turn.invalid for turn in trajectory.turns)
        self.stats.cut_responses -= sum(turn.finish_reason == "length" for turn in trajectory.turns)

    def _finish_if_complete(self, attempt: _Attempt) -> None:
        if attempt.over and not attempt.pending:
            if attempt.live is not None:
                self._stream.release([attempt.live.key])
            self._finished[attempt.index] = attempt.trajectory
            del self._attempts[attempt.index]

    # ---- the engine -----------------------------------------------------------------------------------------------------------------

    def _ask(self, attempt: _Attempt, request: Request, sampling: Sampling, reads: Turn | None = None) -> None:
        attempt.pending[request.key] = (request, sampling, reads)
        self._owner[request.key] = attempt
        self._stream.submit(request, sampling)

    def _poll_engine(self) -> None:
        if not self._owner:
            return
        began = time.perf_counter()
        try:
            # Environments at work may want the next response any moment: no long wait for the engine then.
            answers = self._stream.poll(0.001 if len(self._pool) else _POLL)
        except EngineDied as error:
            self._restart(error)
            answers = []
        self.stats.engine_seconds += time.perf_counter() - began
        for key, completion in answers:
            attempt = self._owner.pop(key)
            request, _, reads = attempt.pending.pop(key)
            if reads is None:
                self._answered(attempt, request, completion)
            else:
                reads.q_logit = completion.v_logit
                self._finish_if_complete(attempt)

    def _restart(self, error: EngineDied) -> None:
        if self.stats.engine_restarts >= self._restarts_allowed:
            raise error
        self.stats.engine_restarts += 1
        log.warning("the generation engine died (%s): starting it again; %d requests are repeated", error, len(self._owner))
        self._stream.restart()
        for attempt in self._attempts.values():
            for request, sampling, _ in attempt.pending.values():
                self._stream.submit(request, sampling)
