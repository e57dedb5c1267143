"""The environment protocol: gymnasium's five-tuple on text, with no dependency on gymnasium.

``reset(seed=None, options={"task": id}) -> (observation, info)``
``step(command) -> (observation, reward, terminated, truncated, info)``

``info`` keys, all optional: ``admissible_commands`` (list of str), ``won`` (bool), ``task_id`` (str), ``invalid`` (bool: the command was not understood),
``task`` (str: the goal in words), ``task_type`` (str: for per-type success rates).
An environment knows no model. It may raise at any time: the caller ends that episode, counts it and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sapo_fast.envs.demonstration import Demonstration


class TextEnv(Protocol):
    """One environment, reusable by ``reset``."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the task ``options["task"]``."""

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do one command: observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Free what the environment holds."""


class TaskSuite(Protocol):
    """A family of tasks and a maker of environments for them. Training and evaluation tasks are disjoint by id."""

    name: str
    system_prompt: str  # what the model is told once, before the first observation (may be empty)

    def train_tasks(self) -> Sequence[str]:
        """Ids to sample from in training (may be lazy: only ``len`` and indexing are used)."""

    def eval_tasks(self) -> Sequence[str]:
        """Ids of the evaluation panel, in a fixed order."""

    def make(self) -> TextEnv:
        """A new environment that can be reset to any task id of this suite."""


class Demonstrator(TaskSuite, Protocol):
    """A suite that can also show how it is done: what the embedded model's warm start needs."""

    def expert_episodes(self, n: int, *, seed: int, max_turns: int, noise: Mapping[str, float]) -> Iterable[Demonstration]:
        """``n`` episodes of an expert on training tasks, a function of ``seed``; ``noise``: its imperfections, by name."""
