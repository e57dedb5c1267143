"""The two reserved vocabulary entries w+ and w-: choose them, check them, read the value from them, ban them from
the policy (method: Turn, boundaries, readout).

Legend: T rows of the logits or hidden states, M value rows, V rows of the LM head (vocabulary), H hidden size.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import checks
from .row_pass import Head, readout_from_hidden, stat_dtype

# Names tokenizers give to entries kept for later: <|reserved_special_token_7|>, <unused12>, <extra_id_3>, [unused5], <|placeholder1|>.
# Only in brackets: "reserved" and "placeholder" are ordinary words of a large vocabulary as well.
_RESERVED = re.compile(r"[<\[].*(reserved|unused|extra_id|placeholder|dummy).*[>\]]", re.IGNORECASE)
# Distances are compared among at most this many candidates: [512, 512] numbers.
_MOST_CANDIDATES = 512


def choose_value_tokens(tokenizer: Any, lm_head: Tensor, *, seen_ids: Iterable[int] = ()) -> tuple[int, int]:
    """Two ids that are never sampled, never in the input and never shown.

    First choice: padding rows of the LM head beyond the tokenizer, ids in [len(tokenizer), V). Else entries the tokenizer keeps in reserve
    (by name, e.g. ``<|reserved_special_token_0|>``). Else special tokens that the chat template does not use, such as the marks of
    repositories and notebooks (``<repo_name>``); without a chat template it is not known which these are, and there are none. Among
    the candidates the two whose rows are nearest, so that V starts near 0.

    Args:
        tokenizer: anything with ``len()``; for the second choice also ``get_vocab()``, for the third ``chat_template``,
            ``apply_chat_template`` and ``added_tokens_decoder``, as Hugging Face tokenizers have.
        lm_head: [V, H] weight of the LM head.
        seen_ids: ids known to occur in data; never chosen.

    Raises:
        ValueError: fewer than two candidates.
    """
    checks.lm_head_weight(lm_head)
    rows, known, seen = lm_head.shape[0], len(tokenizer), set(seen_ids)
    candidates = [i for i in range(known, rows) if i not in seen]
    taken = seen | _named_ids(tokenizer)
    if len(candidates) < 2:
        vocab = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        candidates = sorted(i for text, i in vocab.items() if _RESERVED.fullmatch(text) and i < rows and i not in taken)
    if len(candidates) < 2:
        candidates = sorted(i for i in _specials_outside_chat(tokenizer) if i < rows and i not in taken)
    if len(candidates) < 2:
        raise ValueError(
            f"no two spare ids for the value tokens: the tokenizer has {known} entries, the LM head {rows} rows, and no reserved or unused "
            "special entries; enlarge the embedding by two rows (model.resize_token_embeddings) or name two ids that never occur"
        )
    candidates = candidates[:_MOST_CANDIDATES]
    picked = lm_head.detach()[torch.tensor(candidates, device=lm_head.device)].double()
    distance = torch.cdist(picked, picked, compute_mode="donot_use_mm_for_euclid_dist")
    distance.fill_diagonal_(torch.inf)
    nearest = int(distance.argmin())
    first, second = sorted(divmod(nearest, len(candidates)))
    return candidates[first], candidates[second]


def _specials_outside_chat(tokenizer: Any) -> list[int]:
    """Special tokens that stand neither in the chat template nor in what it makes of a conversation."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return []
    text = template if isinstance(template, str) else "\n".join(template.values())
    # Some templates put a mark together ('<|' + role + '|>'), so that it shows in what they render alone.
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    rendered = []
    for messages in (turns, [{"role": "system", "content": "system"}, *turns]):
        # A template refuses roles it does not know (system) by raising whatever it likes.
        with contextlib.suppress(Exception):
            rendered.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if not rendered:
        return []
    text = "\n".join((text, *rendered))
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special and str(token) not in text]


def _named_ids(tokenizer: Any) -> set[int]:
    """Ids with a job: end of sequence, padding, beginning, unknown, ..."""
    names = ("eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
    ids: set[int] = set()
    for name in names:
        value = getattr(tokenizer, name, None)
        ids.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return ids


def check_value_tokens(value_token_ids: tuple[int, int], *, tokenizer: Any, vocab_size: int, token_ids: Iterable[int] = ()) -> None:
    """Refuse ids that cannot serve as w+ and w-.

    Args:
        value_token_ids: (w+, w-).
        tokenizer: anything with ``len()``; for ids below that also ``convert_ids_to_tokens`` and ``encode``.
        vocab_size: rows of the LM head, V.
        token_ids: ids of the texts at hand (prompts, demonstrations, responses), in which neither may occur.

    Raises:
        ValueError: equal or outside [0, V); the tokenizer's end, padding, beginning or unknown token; a text the tokenizer splits, so that
            the id could never be told from its pieces; an id that occurs in ``token_ids``.
    """
    pair = checks.value_token_pair(value_token_ids, vocab_size)
    named, occurring = _named_ids(tokenizer), set(token_ids)
    for name, token in zip(("w_plus", "w_minus"), pair, strict=True):
        if token in named:
            raise ValueError(f"value_token_ids: {name} = {token} is the end, padding, beginning or unknown token; choose a spare one")
        if token in occurring:
            raise ValueError(f"value_token_ids: {name} = {token} occurs in the text; choose an id that never occurs")
        if token < len(tokenizer):
            text = tokenizer.convert_ids_to_tokens(token)
            pieces = list(tokenizer.encode(text, add_special_tokens=False))
            if pieces != [token]:
                raise ValueError(
                    f"value_token_ids: {name} = {token} is {text!r}, which the tokenizer reads as {pieces}; choose a reserved "
                    f"entry or a row beyond the tokenizer ({len(tokenizer)} to {vocab_size - 1})"
                )


def equalize_rows(lm_head: Tensor, value_token_ids: tuple[int, int], *, lm_head_bias: Tensor | None = None) -> None:
    """Copy row w+ into row w-, in place (and the bias): the readout is then exactly 0 at every context (method: What goes wrong, 2)."""
    checks.lm_head_weight(lm_head)
    plus, minus = checks.value_token_pair(value_token_ids, lm_head.shape[0])
    with torch.no_grad():
        lm_head[minus] = lm_head[plus]
        if lm_head_bias is not None:
            lm_head_bias[minus] = lm_head_bias[plus]


def ban_mask(value_token_ids: tuple[int, int], vocab_size: int, *, device: torch.device | str | None = None) -> Tensor:
    """[V] bool, True at w+ and w-: what every softmax of the policy leaves out."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    mask[list(checks.value_token_pair(value_token_ids, vocab_size))] = True
    return mask


def ban_logits(logits: Tensor, value_token_ids: tuple[int, int]) -> Tensor:
    """A copy of logits [..., V] with -inf at w+ and w-, for sampling."""
    pair = checks.value_token_pair(value_token_ids, logits.shape[-1])
    return logits.index_fill(-1, torch.tensor(pair, device=logits.device), -torch.inf)


def ban_in_generation_config(generation_config: Any, value_token_ids: tuple[int, int]) -> None:
    """Add both ids to ``suppress_tokens`` of a Hugging Face generation config, in place; the exported model then never samples them."""
    present = list(getattr(generation_config, "suppress_tokens", None) or [])
    generation_config.suppress_tokens = present + [token for token in value_token_ids if token not in present]


def read_values(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    lm_head: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    value_token_ids: tuple[int, int],
    rows: Tensor,
    r_max: float,
    tau_v: float = 1.0,
    readout: str = "linear",
    check: bool = True,
) -> Tensor:
    """r_max * (z[w+] - z[w-]) / tau_v at ``rows`` (method: Turn, boundaries, readout): V at last context tokens, Q at last response tokens.

    Two columns of the LM head are used, not the vocabulary. ``readout="clip"`` clips to [-r_max, r_max], without gradient outside.
    Differentiable.

    Args: as `fused_loss`; ``rows`` [M] integers.

    Returns:
        [M] reward units, float32 (float64 for float64 input).

    Raises:
        ValueError: as `fused_loss`.
    """
    checks.read_values(
        logits=logits, hidden=hidden, lm_head=lm_head, lm_head_bias=lm_head_bias, value_token_ids=value_token_ids, rows=rows, r_max=r_max,
        tau_v=tau_v, readout=readout, check=check,
    )  # fmt: skip
    rows = rows.to(torch.int64)
    if logits is not None:
        plus, minus = value_token_ids
        wide = stat_dtype(logits.dtype)
        u = (logits[rows, plus].to(wide) - logits[rows, minus].to(wide)) / tau_v
    else:
        with torch.autocast(hidden.device.type, enabled=False):
            u = readout_from_hidden(Head(hidden, lm_head, lm_head_bias), hidden[rows].to(stat_dtype(hidden.dtype)), value_token_ids) / tau_v
    return r_max * (u.clamp(-1, 1) if readout == "clip" else u)
