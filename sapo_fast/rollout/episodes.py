"""Play episodes: environments and an engine in lock-step, a turn of every live episode at a time.

Only live episodes are prompted and stepped. An environment that raises ends its own episode and nothing else.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sapo_fast.envs.base import TaskSuite, TextEnv
from sapo_fast.records import EndReason, Trajectory, Turn
from sapo_fast.rollout.engine import Completion, Engine, Request, Sampling
from sapo_fast.rollout.prompts import History, PromptBuilder
from sapo_fast.rollout.sampler import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("sapo_fast")
_KEYS = itertools.count()  # of all runners: two that share an engine must not share a key


@dataclass
class RolloutStats:
    """What one ``run`` did. Seconds are wall-clock; tokens are counted as prompted, whether computed or held in the engine's cache."""

    episodes: int = 0
    turns: int = 0
    terminated: int = 0
    truncated: int = 0
    overlong: int = 0
    crashed: int = 0
    invalid: int = 0  # turns
    cut_responses: int = 0  # turns whose response budget ran out
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of those, what the engine did not compute again
    generated_tokens: int = 0
    engine_seconds: float = 0.0
    env_seconds: float = 0.0
    prompt_seconds: float = 0.0  # building prompts, reading responses


@dataclass
class LiveEpisode:
    """An episode in progress: its environment waits for the response to ``prompt_ids``."""

    index: int
    key: int
    env: TextEnv
    history: History
    trajectory: Trajectory
    info: dict[str, Any]
    prompt_ids: list[int]


Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


def _checked(observation: str, info: Mapping[str, Any]) -> Reset:
    """What an environment returned, with an ``info`` of our own: the environment may change its dictionary later."""
    if not isinstance(observation, str):
        raise TypeError(f"the observation must be text, got {type(observation).__name__}")
    return observation, dict(info)


def reset_env(env: TextEnv, task_id: str, seed: int) -> Reset | Exception:
    """Reset to the task. Whatever an environment raises is returned: it ends its own episode only."""
    try:
        return _checked(*env.reset(seed=seed, options={"task": task_id}))
    except Exception as error:
        return error


def step_env(env: TextEnv, command: str) -> Step | Exception:
    """Do one command. Whatever an environment raises is returned."""
    try:
        observation, reward, terminated, truncated, info = env.step(command)
        observation, info = _checked(observation, info)
        return observation, float(reward), terminated, truncated, info
    except Exception as error:
        return error


def cached_tokens(engine: Engine) -> int:
    """Prompt tokens that an engine has not had to compute so far, where it counts them."""
    return getattr(getattr(engine, "stats", None), "cached_tokens", 0)


class EpisodeRunner:
    """Plays tasks of one suite with one engine.

    sampling: how every response is sampled; its stop_ids are normally ``builder.end_ids``. max_turns: an episode that reaches it
    is "truncated", unless its last turn terminated it. reward_scale: multiplies every reward. max_live: episodes at once; as they
    end, waiting tasks take their places. Environments are made on demand and reused by reset; one that raised is closed and
    replaced. ``stats`` describes the last ``run``.
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
    ) -> None:
        if max_turns < 1 or max_live < 1:
            raise ValueError(f"max_turns and max_live must be at least 1; got {max_turns} and {max_live}")
        if not math.isfinite(reward_scale):
            raise ValueError(f"reward_scale must be finite; got {reward_scale}")
        self.suite, self.engine, self.builder, self.tokenizer = suite, engine, builder, tokenizer
        self.sampling, self.max_turns, self.reward_scale, self.max_live = sampling, max_turns, reward_scale, max_live
        self.stats = RolloutStats()
        self._idle: list[TextEnv] = []

    def run(self, tasks: Sequence[tuple[str, int, int]], progress: str | None = None) -> list[Trajectory]:
        """Play one episode for each (task id, seed, group) and return the trajectories in that order.

        ``progress``: the label of a progress bar; None: no bar. A trajectory is a function of weights, task and seed (up to the
        engine's rounding). ValueError: a reward that is not finite, named with its trajectory and turn.
        """
        from tqdm import tqdm

        self.stats = stats = RolloutStats()
        engine_before = cached_tokens(self.engine)
        finished: dict[int, Trajectory] = {}
        live: list[LiveEpisode] = []
        started = 0
        bar = tqdm(total=len(tasks), desc=progress, disable=progress is None, unit="episode")
        try:
            while len(finished) < len(tasks):
                while len(live) < self.max_live and started < len(tasks):
                    trajectory, episode = self._start(started, *tasks[started])
                    if episode is None:
                        finished[started] = trajectory
                    else:
                        live.append(episode)
                    started += 1
                over = self._turn(live) if live else []
                finished |= {episode.index: episode.trajectory for episode in over}
                live = [episode for episode in live if episode.index not in finished]
                bar.update(len(finished) - bar.n)
        except BaseException:  # an interruption too: nothing half played is kept
            self._abandon(live)
            raise
        finally:
            bar.close()
        trajectories = [finished[i] for i in range(len(tasks))]
        stats.reused_tokens = cached_tokens(self.engine) - engine_before
        self._count(trajectories)
        return trajectories

    def _count(self, trajectories: list[Trajectory]) -> None:
        stats = self.stats
        stats.episodes = len(trajectories)
        for reason in ("terminated", "truncated", "overlong", "crashed"):
            setattr(stats, reason, sum(t.end == reason for t in trajectories))
        if stats.crashed:
            log.warning("%d of %d episodes crashed", stats.crashed, stats.episodes)

    def _abandon(self, live: list[LiveEpisode]) -> None:
        self.engine.release([episode.key for episode in live])
        for episode in live:
            if not any(episode.env is env for env in self._idle):
                self._close(episode.env)

    @staticmethod
    def _close(env: TextEnv) -> None:
        try:
            env.close()
        except Exception as error:  # a broken environment may not even close
            log.debug("closing an environment failed: %s", error)

    def close(self) -> None:
        """Close the idle environments."""
        while self._idle:
            self._idle.pop().close()

    def _start(self, index: int, task_id: str, seed: int, group: int) -> tuple[Trajectory, LiveEpisode | None]:
        """Reset an environment to the task. No live episode: it ended before its first turn."""
        env = self._idle.pop() if self._idle else self.suite.make()
        began = time.perf_counter()
        found = reset_env(env, task_id, seed)
        self.stats.env_seconds += time.perf_counter() - began
        return self._admit(index, Trajectory(task_id=task_id, seed=seed, group=group), env, found)

    def _admit(self, index: int, trajectory: Trajectory, env: TextEnv, found: Reset | Exception) -> tuple[Trajectory, LiveEpisode | None]:
        """Make a live episode of what ``reset_env`` found; None: it ended before its first turn."""
        if isinstance(found, Exception):
            self._crash(trajectory, env, found)
            return trajectory, None
        observation, info = found
        trajectory.task_type = str(info.get("task_type") or "")
        history = self.builder.start()
        prompt_ids = self._prompt(history, observation, info)
        if len(prompt_ids) >= self.engine.max_context_tokens:
            trajectory.end = "overlong"
            self._idle.append(env)
            return trajectory, None
        return trajectory, LiveEpisode(index, next(_KEYS), env, history, trajectory, info, prompt_ids)

    def _turn(self, live: list[LiveEpisode]) -> list[LiveEpisode]:
        """One turn of every live episode. Returns those that ended, released."""
        began = time.perf_counter()
        requests = [Request(e.key, e.prompt_ids, derive_seed(e.trajectory.seed, len(e.trajectory.turns))) for e in live]
        completions = self.engine.generate(requests, self.sampling)
        self.stats.engine_seconds += time.perf_counter() - began
        over = []
        for episode, completion in zip(live, completions, strict=True):
            end = self._step(episode, completion)
            if end is not None:
                episode.trajectory.end = end
                over.append(episode)
                if end != "crashed":
                    self._idle.append(episode.env)
        self.engine.release([episode.key for episode in over])
        return over

    def _step(self, episode: LiveEpisode, completion: Completion) -> EndReason | None:
        """Send one response to its environment; None: the episode goes on."""
        command = self._respond(episode, completion)
        began = time.perf_counter()
        found = step_env(episode.env, command)
        self.stats.env_seconds += time.perf_counter() - began
        return self._observe(episode, found)

    def _respond(self, episode: LiveEpisode, completion: Completion) -> str:
        """Record a response as the episode's next turn and return the command it holds."""
        trajectory, stats, b = episode.trajectory, self.stats, self.builder
        began = time.perf_counter()
        ids = completion.token_ids
        text = self.tokenizer.decode(
            ids[:-1] if ids[-1] in b.end_ids else ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        parsed = b.parse(text, episode.info.get("admissible_commands"))
        turn = Turn(
            prompt_ids=episode.prompt_ids,
            response_ids=ids,
            rollout_logprobs=completion.logprobs,
            invalid=not parsed.valid,
            finish_reason=completion.finish_reason,
            observation=episode.history.shown,
            response=text,
            command=parsed.command,
            v_logit=completion.v_logit,
        )
        trajectory.turns.append(turn)
        stats.turns += 1
        stats.prompt_tokens += len(turn.prompt_ids)
        stats.generated_tokens += len(ids)
        stats.cut_responses += turn.finish_reason == "length"
        episode.history.respond(ids, parsed.command)
        stats.prompt_seconds += time.perf_counter() - began
        return parsed.command

    def _observe(self, episode: LiveEpisode, found: Step | Exception) -> EndReason | None:
        """Complete the last turn with what ``step_env`` found; None: the episode goes on."""
        trajectory, stats, b = episode.trajectory, self.stats, self.builder
        turn = trajectory.turns[-1]
        if isinstance(found, Exception):
            self._crash(trajectory, episode.env, found)
            stats.invalid += turn.invalid
            return "crashed"
        observation, reward, terminated, truncated, info = found
        if not math.isfinite(reward):
            raise ValueError(
                f"task {trajectory.task_id} (seed {trajectory.seed}), turn {len(trajectory.turns)}: the environment's reward is {reward}; "
                "rewards must be finite numbers"
            )
        turn.reward = reward * self.reward_scale
        if b.invalid_rule == "admissible" and "admissible_commands" not in episode.info:
            turn.invalid |= self._judged_by_environment(trajectory, info)
        stats.invalid += turn.invalid
        trajectory.won = bool(info.get("won", False))
        score = info.get("score")
        trajectory.score = float(score) if isinstance(score, (int, float)) else None
        if terminated:  # also at the turn limit
            return "terminated"
        at_limit = truncated or len(trajectory.turns) >= self.max_turns
        next_ids = self._prompt(episode.history, observation, info)
        fits = len(next_ids) < self.engine.max_context_tokens
        if at_limit:
            trajectory.final_prompt_ids = next_ids if fits else None
            return "truncated"
        episode.prompt_ids, episode.info = next_ids, info
        return None if fits else "overlong"

    @staticmethod
    def _judged_by_environment(trajectory: Trajectory, info: dict[str, Any]) -> bool:
        if "invalid" not in info:
            raise ValueError(
                f"task {trajectory.task_id}: invalid_rule='admissible' needs info['admissible_commands'] or info['invalid'] from the "
                "environment, which gives neither; use invalid_rule='format'"
            )
        return bool(info["invalid"])

    def _prompt(self, history: History, observation: str, info: dict[str, Any]) -> list[int]:
        began = time.perf_counter()
        ids = history.prompt(observation, info)
        self.stats.prompt_seconds += time.perf_counter() - began
        return ids

    def _crash(self, trajectory: Trajectory, env: TextEnv, error: Exception) -> None:
        trajectory.end = "crashed"
        trajectory.error = f"{type(error).__name__}: {error}"
        where = f"turn {len(trajectory.turns)}" if trajectory.turns else "reset"
        log.warning("task %s (seed %d) crashed at %s: %s", trajectory.task_id, trajectory.seed, where, trajectory.error)
        log.debug("traceback of the crash", exc_info=error)
        self._discard(env, error)

    def _discard(self, env: TextEnv, error: Exception) -> None:
        """Get rid of an environment that raised ``error``."""
        self._close(env)
