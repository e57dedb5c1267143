"""Run a Hugging Face decoder on packed rows, without padding, and find its LM head.

The rows of a micro-batch lie one after the other in one sequence; every token is computed once and attention never crosses a
row. This is done with transformers' attention interface: the attention function "sapo_fast" receives a *layout* (an object with
an ``attend`` method) as a keyword of the forward call and hands it the queries, keys and values. Without a layout the same
function is plain SDPA, so a prepared model still serves ``model(...)`` and ``model.generate(...)`` as before. The rollout engine
uses the same door for its own key-value cache.

Legend: L packed length (tokens of all rows), R rows, H hidden, V vocabulary, D head dimension.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_NAME = "sapo_fast"
LAYOUT_KEY = "sapo_fast_layout"
_ROW_LOCAL_LAYERS = {"full_attention", "sliding_attention"}


class Layout(Protocol):
    """Says how the tokens of one forward call attend."""

    max_context: int  # the longest span of positions any query may look back over, itself included

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """query [b, heads, n, D], key and value [b, kv_heads, n, D] of layer ``layer`` -> [b, n, heads, D]."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layout: Layout | None = kwargs.pop(LAYOUT_KEY, None)
    if layout is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(
                f"{type(module).__name__} does not receive the keywords of the model's forward call, so rows cannot be kept apart; "
                "use a model whose layers pass **kwargs on to the attention function (Llama, Qwen2, Qwen3, Mistral, SmolLM)"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if sliding_window is not None and layout.max_context > sliding_window:
        raise ValueError(_window_message(sliding_window, layout.max_context))
    for name in ("softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name}, which packed attention does not support; use a model without it")
    return layout.attend(module.layer_idx, query, key, value, scaling, dropout), None


def _window_message(window: int, context: int) -> str:
    return (
        f"the model's layers attend over a sliding window of {window} tokens, but the context is {context} tokens long; "
        f"sliding windows are not supported: keep the context <= {window} (max_context_tokens) or use a model without them"
    )


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("Hugging Face models need transformers: pip install 'sapo_fast[train]'")


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)  # for plain calls; ours pass a 4-D mask, which goes through untouched


def check_context(model: nn.Module, max_context: int) -> None:
    """ValueError unless every layer of ``model`` keeps to its row and sees ``max_context`` tokens back."""
    config = decoder_of(model).config
    layer_types = set(getattr(config, "layer_types", None) or ())
    if foreign := sorted(layer_types - _ROW_LOCAL_LAYERS):
        raise ValueError(f"the model has {foreign} layers, whose state would leak between packed rows; use one with attention layers only")
    window = getattr(config, "sliding_window", None)
    in_use = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    if window is not None and in_use and max_context > window:
        raise ValueError(_window_message(window, max_context))


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder under the LM head: token ids -> last hidden states. Adapters (LoRA) inside it stay in force."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or not hasattr(decoder, "config") or decoder is model:
        raise ValueError(f"model must be a Hugging Face causal LM with a decoder and an LM head; got {type(model).__name__}")
    return decoder


def prepare(model: nn.Module) -> nn.Module:
    """Set the attention of ``model`` to "sapo_fast" (once; plain calls keep working) and return its decoder."""
    decoder = decoder_of(model)
    if decoder.config._attn_implementation != ATTENTION_NAME:
        _require_transformers()
        _register()
        decoder.set_attn_implementation(ATTENTION_NAME)
        if decoder.config._attn_implementation != ATTENTION_NAME:
            raise ValueError(f"{type(model).__name__} does not use transformers' attention interface; use Llama, Qwen2, Qwen3 or Mistral")
    return decoder


def run_decoder(decoder: nn.Module, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
    """Last hidden states [b, n, H] of input_ids [b, n] at position_ids [b, n] under ``layout``. ``decoder`` comes from :func:`prepare`."""
    no_mask = torch.empty((1, 1, 0, 0), device=input_ids.device)  # 4-D masks pass through as they are; the layout masks, nothing else may
    output = decoder(input_ids=input_ids, position_ids=position_ids, attention_mask=no_mask, use_cache=False, **{LAYOUT_KEY: layout})
    return output.last_hidden_state


class PackedLayout:
    """Causal attention within each of R rows that lie one after the other. ``cu_seqlens``: R+1 offsets, from 0 to L."""

    def __init__(self, cu_seqlens: list[int], device: torch.device) -> None:
        self.lengths = [b - a for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
        self.max_context = max(self.lengths)
        self.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=device) if device.type == "cuda" else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0 and (varlen := _varlen_kernel()) is not None:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, D]
            return varlen(q, k, v, self.cu_seqlens, self.max_context, scale)[None]
        # One call a row: no mask, no padding, and a row's numbers do not depend on its neighbours. split's backward is one cat;
        # a slice's would be a zero-filled [L] tensor for every row.
        gqa = query.shape[1] != key.shape[1]
        rows = zip(query.split(self.lengths, 2), key.split(self.lengths, 2), value.split(self.lengths, 2), strict=True)
        outputs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=gqa).transpose(1, 2)
            for q, k, v in rows
        ]
        return torch.cat(outputs, dim=1)


@functools.cache
def _varlen_kernel() -> Any:
    """A causal variable-length kernel (q, k, v [L, heads, D], cu_seqlens, max_seqlen, scale) -> [L, heads, D] for CUDA, or None."""
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        return lambda q, k, v, cu, longest, scale: flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True
        )
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters  # torch 2.10 has neither a scale nor windows
    if not {"scale", "window_size"} <= known.keys():
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None) -> Tensor:
        if "enable_gqa" in known:
            return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1])
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
        return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0))

    return run


def packed_hidden(model: nn.Module, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Sequence[int] | Tensor, max_seqlen: int) -> Tensor:
    """Last hidden states of packed rows, differentiable: the input of the LM head, without the LM head.

    input_ids [L] int64, position_ids [L] int64 (restarting at every row), cu_seqlens [R+1] offsets (a list or an int tensor, best
    on the CPU; rows may be empty), max_seqlen the longest row. Returns [L, H] in the model's dtype. Row r attends causally within
    cu_seqlens[r]:cu_seqlens[r+1] and nowhere else. ValueError: shapes or offsets that do not fit, a sliding window shorter than
    max_seqlen.
    """
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if input_ids.ndim != 1 or position_ids.shape != input_ids.shape:
        raise ValueError(
            f"input_ids and position_ids must both be [L], the packed tokens; got {tuple(input_ids.shape)} and {tuple(position_ids.shape)}"
        )
    falls = any(b < a for a, b in zip(offsets, offsets[1:], strict=False))
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != input_ids.shape[0] or falls:
        raise ValueError(f"cu_seqlens must be R+1 offsets rising from 0 to L = {input_ids.shape[0]}; got {offsets[:4]}..{offsets[-1:]}")
    layout = PackedLayout(offsets, input_ids.device)
    if max_seqlen != layout.max_context:
        raise ValueError(f"max_seqlen must be the longest row of cu_seqlens, {layout.max_context}; got {max_seqlen}")
    check_context(model, max_seqlen)
    return run_decoder(prepare(model), input_ids[None], position_ids[None], layout)[0]


def lm_head_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(weight [V, H], bias [V] or None) of the LM head: logits = hidden @ weight.T + bias.

    ValueError where that product would not be the model's logits: an adapted or quantised head, soft-capped or scaled logits.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise ValueError(
            f"the LM head must be a plain linear layer; got {type(head).__name__}. Leave it out of the adapter's target_modules and "
            "modules_to_save, and out of quantisation"
        )
    config = decoder_of(model).config
    for name, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        found = getattr(config, name, neutral)
        if found is not None and found != neutral:
            raise ValueError(f"the model changes its logits after the LM head ({name}={found}), which is not supported")
    return head.weight, head.bias
