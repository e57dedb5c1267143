"""Rollouts with vLLM inside this process: continuous batching, prefix caching, exact log-probs, V for free.

The engine is made with dummy weights; ``weight_sync`` copies the trainer's in, and proves it, at the start and after every update. It
shares the process with the trainer because only then can weights be handed over as tensors; ``vllm_server`` is for other processes.
"""

from __future__ import annotations

import gc
import logging
import random
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sapo_fast.models.packed import lm_head_of
from sapo_fast.rollout import vllm_setup as setup
from sapo_fast.rollout.engine import Completion, EngineDied, Request, Sampling, check_requests
from sapo_fast.rollout.weight_sync import CanaryAnswer, SyncReport, WeightMismatch, WeightSync

log = logging.getLogger("sapo_fast")
_live: weakref.ref[VLLMEngine] | None = None  # vLLM keeps process-wide state: groups, memory pools, thread settings


class VLLMEngine:
    """A streaming engine (see ``rollout.engine``) over an in-process vLLM, on the model's device and in its dtype.

    model: a causal LM whose weights the engine follows: call ``weights_changed()`` after they moved; until then ``submit`` refuses.
    value_token_ids: (w+, w-), never sampled and outside every log-prob. max_context_tokens: prompt + response never exceed it. max_live:
    requests in progress at once; more wait. kv_cache_mb: memory of keys and values; None: what max_live full contexts need. sleep: free
    vLLM's memory (weights and cache) between ``rest()`` and the next request; CUDA only. tolerance: see WeightSync.

    Every completion carries ``v_logit``. A response is a function of weights, prompt, seed and sampling up to floating-point rounding.
    ModuleNotFoundError, ValueError: vLLM is missing, or built for another device. RuntimeError: a second engine in one process.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value_token_ids: tuple[int, int],
        max_context_tokens: int,
        max_live: int = 64,
        kv_cache_mb: int | None = None,
        sleep: bool = False,
        tolerance: float | None = None,
    ) -> None:
        global _live
        setup.require_vllm()
        setup.check_model(model, value_token_ids, max_context_tokens, max_live)
        if _live is not None and _live() is not None:
            raise RuntimeError(
                "this process has a vLLM engine already, and vLLM keeps process-wide state that two would share; close() the first, or run "
                "the second in a process of its own"
            )
        weight, _ = lm_head_of(model)
        if sleep and weight.device.type != "cuda":
            raise ValueError(f"rollout.vllm.sleep frees GPU memory, but the model is on {weight.device.type}; set it to false")
        setup.prepare_environment(cpu=weight.device.type == "cpu", in_process=True)
        self.max_context_tokens = max_context_tokens
        self.stats = setup.EngineStats()
        self.last_sync: SyncReport | None = None
        self._model, self._banned, self._vocabulary = model, value_token_ids, weight.shape[0]
        self._arguments = setup.engine_arguments(
            model, max_context_tokens=max_context_tokens, max_live=max_live, kv_cache_mb=kv_cache_mb, cpu=weight.device.type == "cpu"
        )
        if sleep:
            self._arguments["enable_sleep_mode"] = True
        if weight.device.type == "cuda":
            self._arguments["gpu_memory_utilization"] = 0.1  # a check only, and the trainer holds memory too: kv_cache_memory_bytes rules
        self.max_prompt_tokens = (
            self._arguments["max_model_len"] - 1
        )  # submit() takes prompts that fill the context, for the sake of V alone
        self._sleep, self._asleep = sleep, False
        self._in_progress: dict[str, tuple[Request, Sampling]] = {}
        self._count = 0
        _live = weakref.ref(self)
        try:
            with _untouched_generators():
                self._start()
                self.sync = WeightSync(
                    model,
                    self,
                    value_token_ids=value_token_ids,
                    dtype=getattr(torch, self._llm.collective_rpc("sapo_dtype")[0]),
                    context=max_context_tokens,
                    tolerance=tolerance,
                )
                self.sync.rehearse()
        except BaseException:
            self.close()
            raise

    # ---- the engine's life ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            from vllm import LLM
            from vllm.platforms import current_platform

            setup.require_device(lm_head_of(self._model)[0].device, current_platform.device_type)
            from sapo_fast.rollout.vllm_worker import keep_plain_weights

            keep_plain_weights()

            setup.write_shape(self._model, Path(folder))
            self._llm = LLM(folder, worker_extension_cls=setup.WORKER_EXTENSION, seed=0, **self._arguments)

    def close(self) -> None:
        """Shut vLLM down and free its memory. Another engine may then be made."""
        global _live
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            try:
                llm.llm_engine.engine_core.shutdown()
            except Exception as error:  # a broken engine may not even shut down
                log.debug("shutting vLLM down failed: %s", error)
            del llm
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            gc.collect()
            cleanup_dist_env_and_memory()
        self._in_progress.clear()
        _live = None

    def restart(self) -> None:
        """A new vLLM with the model's current weights; requests in progress are forgotten. EngineDied: it would not start."""
        global _live
        self.close()
        _live = weakref.ref(self)
        self.stats.restarts += 1
        try:
            with _untouched_generators():
                self._start()
                self.sync.rehearse()
        except Exception as error:
            raise EngineDied(f"vLLM could not be started again: {error}") from error

    # ---- requests -------------------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sampling: Sampling) -> None:
        """Begin a response. ValueError: see ``check_requests``. RuntimeError: the weights moved and nobody called weights_changed()."""
        check_requests([request], sampling, vocabulary=self._vocabulary, banned=self._banned, max_context_tokens=self.max_prompt_tokens + 1)
        if self.sync.moved():
            raise RuntimeError("the model's weights have moved since the engine's last sync; call weights_changed() first")
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        self._add(request, sampling)

    def _add(self, request: Request, sampling: Sampling) -> None:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(**setup.sampling_arguments(request, sampling, self._banned, self.max_context_tokens))
        name = str(self._count)
        self._count += 1
        self._in_progress[name] = (request, sampling)
        self._llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(request.prompt_ids)), params)

    def poll(self, timeout: float = 0.0) -> list[tuple[int, Completion]]:
        """One step of vLLM: (key, response) of the requests that it ended. EngineDied: vLLM raised."""
        return [(request.key, completion) for request, completion, _ in self._step()]

    def _step(self) -> list[tuple[Request, Completion, int]]:
        if not self._in_progress:
            return []
        try:
            outputs = self._llm.llm_engine.step()
        except Exception as error:
            raise EngineDied(f"vLLM failed in a step: {type(error).__name__}: {error}") from error
        done = []
        for output in outputs:
            if not output.finished or output.request_id not in self._in_progress:  # the latter: aborted meanwhile
                continue
            request, sampling = self._in_progress.pop(output.request_id)
            answer = output.outputs[0]
            if answer.finish_reason not in ("stop", "length"):
                raise EngineDied(f"vLLM gave up request {request.key}: finish reason {answer.finish_reason!r}")
            positions = [{i: entry.logprob for i, entry in position.items()} for position in answer.logprobs]
            cached = output.num_cached_tokens or 0
            done.append((request, setup.to_completion(answer.token_ids, positions, request, sampling, self._banned), cached))
            self.stats.prompt_tokens += len(request.prompt_ids)
            self.stats.cached_tokens += cached
            self.stats.generated_tokens += len(answer.token_ids)
        return done

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Responses in the order of the requests; log-probs at the sampling temperature (greedy: at temperature 1) without w+ and w-."""
        check_requests(requests, sampling, vocabulary=self._vocabulary, banned=self._banned, max_context_tokens=self.max_context_tokens)
        for request in requests:
            self.submit(request, sampling)
        return [completion for completion, _ in self._all(requests)]

    def _all(self, requests: Sequence[Request]) -> list[tuple[Completion, int]]:
        """Work until these, the only requests in progress, are answered; with the number of prompt tokens found in the prefix cache."""
        done: dict[int, tuple[Completion, int]] = {}
        try:
            while self._in_progress:
                done |= {request.key: (completion, cached) for request, completion, cached in self._step()}
        except BaseException:  # nothing half answered is kept
            self.release([request.key for request in requests])
            raise
        return [done[request.key] for request in requests]

    def release(self, keys: Iterable[int]) -> None:
        """Abort what these episodes have in progress. vLLM's prefix cache forgets by itself."""
        keys = set(keys)
        names = [name for name, (request, _) in self._in_progress.items() if request.key in keys]
        for name in names:
            del self._in_progress[name]
        if names:
            self._llm.llm_engine.abort_request(names)

    # ---- weights --------------------------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Copy the model's weights in and prove it. WeightMismatch: the engine does not compute with them."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        self.last_sync = self.sync.sync()

    def rest(self) -> None:
        """No request will come for a while: with ``sleep`` vLLM's memory is freed until the next one."""
        if self._sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self._llm.collective_rpc("sapo_load", args=(weights,))
        except Exception as error:
            raise WeightMismatch(
                f"vLLM could not load the weights ({type(error).__name__}: {error}): its layers may hold packed copies"
            ) from error

    def reset_prefix_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def bit_sums(self) -> dict[str, int]:
        return {name: int(text) for name, text in self._llm.collective_rpc("sapo_bit_sums", args=(self._vocabulary,))[0].items()}

    def weight_groups(self) -> dict[str, list[str]]:
        return self._llm.collective_rpc("sapo_groups")[0]

    def canary(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[CanaryAnswer]:
        requests, sampling = setup.canary_requests(prompts, tokens)
        for request in requests:
            self._add(request, sampling)
        return [setup.canary_answer(completion, cached) for completion, cached in self._all(requests)]


@contextmanager
def _untouched_generators() -> Iterator[None]:
    """vLLM seeds every global generator when it starts in process; the trainer's must not notice."""
    states: tuple[Any, ...] = (random.getstate(), np.random.get_state())
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
