"""Environment calls beside generation: daemon threads with a time limit, so that one that hangs costs its episode and nothing else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


class EnvTimeout(TimeoutError):
    """A call took longer than it may; a thread may still be in it."""


@dataclass
class _Call:
    key: Hashable
    work: Callable[[], Any]
    began: float | None = None  # None: waiting for a thread
    lost: bool = False  # timed out: whatever it still returns is dropped


class EnvPool:
    """Runs calls in ``workers`` threads; 0: at once, in the caller's.

    timeout: seconds a call may take from when a thread takes it up; None: any (and with no workers none can be enforced). A call that
    exceeds it is answered with an EnvTimeout, its thread is left to itself and replaced. Threads die with the process. A call must not
    raise: it returns what it found, errors too. (A KeyboardInterrupt or the like that does come out of one is raised by ``poll``.)
    """

    def __init__(self, workers: int, timeout: float | None) -> None:
        if workers < 0 or (timeout is not None and timeout <= 0):
            raise ValueError(f"workers must be at least 0 and timeout positive or None; got {workers} and {timeout}")
        self._workers, self._timeout = workers, timeout
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Call, Any]] = queue.SimpleQueue()
        self._calls: dict[Hashable, _Call] = {}
        self._threads = 0
        self.seconds = 0.0  # spent inside calls, summed over threads

    def __len__(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    def submit(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Begin a call; ``key`` must not be one in progress."""
        call = _Call(key, work)
        self._calls[key] = call
        if not self._workers:
            self._run(call)
            return
        if self._threads < min(self._workers, len(self._calls)):
            self._new_thread()
        self._waiting.put(call)

    def poll(self, timeout: float) -> list[tuple[Hashable, Any]]:
        """(key, result) of the calls that ended, waiting up to ``timeout`` seconds for the first."""
        done = []
        patience = timeout if self._calls else 0.0
        while True:
            if self._timeout is not None and patience > 0:
                patience = min(patience, self._next_deadline())
            try:
                call, result = self._done.get(timeout=patience) if patience > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            patience = 0.0
            if not call.lost:
                del self._calls[call.key]
                if isinstance(result, BaseException) and not isinstance(result, Exception):
                    raise result
                done.append((call.key, result))
        return done + self._overdue()

    def _next_deadline(self) -> float:
        assert self._timeout is not None
        begun = [call.began for call in list(self._calls.values()) if call.began is not None]
        return max(0.001, min(begun) + self._timeout - time.perf_counter()) if begun else 0.05

    def _overdue(self) -> list[tuple[Hashable, Any]]:
        if self._timeout is None:
            return []
        now = time.perf_counter()
        late = [call for call in self._calls.values() if call.began is not None and now - call.began > self._timeout]
        for call in late:
            call.lost = True
            del self._calls[call.key]
            if self._workers:
                self._new_thread(replaces=True)
        return [(call.key, EnvTimeout(f"the environment did not answer within {self._timeout:g} s")) for call in late]

    def busy(self, key: Hashable) -> bool:
        """Is this call in progress?"""
        return key in self._calls

    def forget(self) -> None:
        """Drop every call in progress."""
        for call in self._calls.values():
            call.lost = True
        self._calls.clear()

    def close(self) -> None:
        """Let the idle threads end."""
        self.forget()
        for _ in range(self._threads):
            self._waiting.put(None)
        self._threads = 0

    def _new_thread(self, replaces: bool = False) -> None:
        self._threads += not replaces
        threading.Thread(target=self._serve, name="sapo_fast-env", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._waiting.get()) is not None:
            if not call.lost:
                try:
                    self._run(call)
                except BaseException as error:
                    self._done.put((call, error))
            if call.lost:
                return  # another thread has taken this one's place

    def _run(self, call: _Call) -> None:
        call.began = time.perf_counter()
        result = call.work()
        self.seconds += time.perf_counter() - call.began
        self._done.put((call, result))
