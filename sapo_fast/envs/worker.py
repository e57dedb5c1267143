"""Environments in processes of their own: one that hangs is killed, one that dies takes nothing with it.

    env.name=isolated  env.options={suite: alfworld, options: {data: ...}, timeout: 60}

Messages are lines of JSON over pipes, so that nothing a worker sends is ever executed. A worker imports the suite without torch.
What ``info`` holds must be JSON; a dataclass in it arrives as its text.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sapo_fast.envs.base import TaskSuite

_PACKAGE = Path(__file__).resolve().parents[1]
# The package's own __init__ imports torch, which an environment does not need: the worker makes a package of the same folder without it.
_START = (
    "import sys, types; p = types.ModuleType('sapo_fast'); p.__path__ = [sys.argv[1]]; sys.modules['sapo_fast'] = p; "
    "from sapo_fast.envs.worker import serve; serve()"
)


class Isolated:
    """A suite whose environments run in processes of their own.

    suite, options: as ``env.name`` and ``env.options``. timeout: seconds for one reset or step, after which the worker is killed, the
    call raises TimeoutError and the episode ends as crashed. start_timeout: seconds for a worker to start and make its environment.
    """

    def __init__(self, suite: str, options: Mapping[str, Any] | None = None, timeout: float = 60.0, start_timeout: float = 120.0) -> None:
        from sapo_fast.envs import make_suite

        for label, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
                raise ValueError(f"isolated: {label} must be a number of seconds above 0, got {seconds!r}")
        if suite == "isolated":
            raise ValueError("isolated: suite must be another environment, got 'isolated'; name the one to run in processes")
        self._suite: TaskSuite = make_suite(suite, options)
        self._start = {"suite": suite, "options": dict(options or {})}
        self.timeout, self.start_timeout = float(timeout), float(start_timeout)
        self.name, self.system_prompt = self._suite.name, self._suite.system_prompt

    def train_tasks(self) -> Sequence[str]:
        return self._suite.train_tasks()

    def eval_tasks(self) -> Sequence[str]:
        return self._suite.eval_tasks()

    @property
    def report(self) -> dict[str, Any]:
        """What the suite itself wants said in reports."""
        return dict(getattr(self._suite, "report", {}))

    def make(self) -> WorkerEnv:
        return WorkerEnv(self._start, self.timeout, self.start_timeout)


class WorkerEnv:
    """The near end of an environment in a process. The process is started by the first reset, and again after it died or was killed."""

    def __init__(self, start: Mapping[str, Any], timeout: float, start_timeout: float) -> None:
        self._start, self._timeout, self._start_timeout = dict(start), timeout, start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self._process is None:
            command = [sys.executable, "-c", _START, str(_PACKAGE)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._unread = b""
            self._ask(self._start, self._start_timeout)
        observation, info = self._ask({"reset": [seed, options]}, self._timeout)
        return observation, info

    def step(self, command: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._process is None:
            raise RuntimeError("no episode is running; call reset first")
        observation, reward, terminated, truncated, info = self._ask({"step": command}, self._timeout)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def __del__(self) -> None:
        self.close()

    def _ask(self, message: Mapping[str, Any], timeout: float) -> list[Any]:
        """Send a message, wait for its answer, and raise what the environment raised."""
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + timeout))
        except TimeoutError:
            self.close()
            raise TimeoutError(f"the environment did not answer within {timeout:g} s and was killed") from None
        except (OSError, EOFError, ValueError) as error:
            process = self._process
            self.close()
            raise RuntimeError(f"the environment's process died (exit code {process.returncode})") from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    def _line(self, deadline: float) -> bytes:
        stream = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise TimeoutError
            more = os.read(stream, 1 << 16)
            if not more:
                raise EOFError
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def serve() -> None:
    """The far end: answer messages until the near end is gone."""
    from sapo_fast.envs import make_suite

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an environment prints goes to the log, not between the answers
    env = None
    for line in sys.stdin.buffer:
        message = json.loads(line)
        try:
            if "suite" in message:
                env, answer = make_suite(message["suite"], message["options"]).make(), None
            elif "reset" in message:
                seed, options = message["reset"]
                answer = env.reset(seed=seed, options=options)
            else:
                answer = env.step(message["step"])
            reply = json.dumps({"answer": answer}, default=str)
        except Exception as error:  # the near end raises it again
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        replies.write(reply.encode() + b"\n")
        replies.flush()
