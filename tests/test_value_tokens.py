"""Choosing, checking, reading and banning the value tokens."""

import types

import pytest
import torch
from helpers_ops import as_logits, cast, error, logits_of, problem

from sapo_fast import (
    ban_in_generation_config,
    ban_logits,
    ban_mask,
    check_value_tokens,
    choose_value_tokens,
    equalize_rows,
    read_values,
    reference,
)


class Tokenizer:
    """Ten letters, an end token, and what a test adds."""

    def __init__(self, extra=()):
        self.names = [*"abcdefghij", "<eos>", *extra]
        self.eos_token_id = 10
        self.pad_token_id = None

    def __len__(self):
        return len(self.names)

    def get_vocab(self):
        return {name: i for i, name in enumerate(self.names)}

    def convert_ids_to_tokens(self, i):
        return self.names[i]

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        if text in self.names and not text.startswith("<split"):
            return [self.names.index(text)]
        return [self.names.index(c) for c in text if c in self.names]


def head(rows, near=()):
    w = torch.randn(rows, 6)
    if near:
        w[near[1]] = w[near[0]] + 1e-3
    return w


def test_spare_rows_come_first_and_the_nearest_pair():
    assert choose_value_tokens(Tokenizer(), head(19, near=(13, 17))) == (13, 17)
    assert choose_value_tokens(Tokenizer(), head(19, near=(2, 3))) not in [(2, 3)], "rows of real tokens are no candidates"
    first, second = choose_value_tokens(Tokenizer(), head(19, near=(13, 17)), seen_ids=[13])
    assert 11 <= first < second < 19 and 13 not in (first, second)
    assert choose_value_tokens(Tokenizer(), head(13)) == (11, 12)
    same = torch.zeros(16, 4, dtype=torch.bfloat16)
    assert choose_value_tokens(Tokenizer(), same) == (11, 12), "all equal: two different ids all the same"


def test_reserved_entries_come_second():
    extra = ("<|reserved_special_token_0|>", "word", "<unused7>", "<|reserved_special_token_1|>")
    ids = choose_value_tokens(Tokenizer(extra), head(15, near=(11, 14)))
    assert ids == (11, 14)
    words = ("reserved", "unused", *extra)
    assert choose_value_tokens(Tokenizer(words), head(17, near=(11, 12))) not in [(11, 12)], "ordinary words are no reserve"
    tokenizer = Tokenizer(extra)
    tokenizer.pad_token_id = 11
    assert choose_value_tokens(tokenizer, head(15, near=(11, 14))) == (13, 14), "a reserved entry used as padding is taken"


class ChatTokenizer(Tokenizer):
    """Special tokens, four of them in the chat template: spelled out, put together, in a branch that a plain conversation does not take,
    and as the end token."""

    chat_template = "<begin> '<|' + role + '|>' {% if tools %}<tool>{% endif %}"

    def __init__(self, extra=("<begin>", "<|user|>", "<|assistant|>", "<tool>", "<repo>", "word", "<file>"), refuses=()):
        super().__init__(extra)
        self.refuses = refuses

    @property
    def added_tokens_decoder(self):
        return {i: Added(name) for i, name in enumerate(self.names) if len(name) > 1}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        if any(m["role"] in self.refuses for m in messages):
            raise RuntimeError("no such role")
        return "<begin>" + "".join(f"<|{m['role']}|>{m['content']}<eos>" for m in messages) + "<|assistant|>"


class Added(str):
    special = property(lambda self: self != "word")


def test_specials_that_no_conversation_holds_come_third():
    near_taken = head(18, near=(11, 12))
    assert choose_value_tokens(ChatTokenizer(), near_taken) == (15, 17)
    assert choose_value_tokens(ChatTokenizer(refuses=("system",)), near_taken) == (15, 17)
    reserved = ChatTokenizer(("<unused0>", "<repo>", "<file>", "<unused1>"))
    assert choose_value_tokens(reserved, head(15, near=(12, 13))) == (11, 14), "what is reserved by name comes before"
    for seen in (15, 17):
        with pytest.raises(ValueError, match="no two spare ids"):
            choose_value_tokens(ChatTokenizer(), near_taken, seen_ids=[seen])
    padded = ChatTokenizer()
    padded.pad_token_id = 15
    with pytest.raises(ValueError, match="no two spare ids"):
        choose_value_tokens(padded, near_taken)
    with pytest.raises(ValueError, match="no two spare ids"):
        choose_value_tokens(ChatTokenizer(refuses=("user",)), near_taken)
    silent = ChatTokenizer()
    silent.chat_template = None
    with pytest.raises(ValueError, match="no two spare ids"):
        choose_value_tokens(silent, near_taken)
    named = ChatTokenizer()
    named.chat_template = {"default": ChatTokenizer.chat_template, "rag": "<file>"}
    with pytest.raises(ValueError, match="no two spare ids"):
        choose_value_tokens(named, near_taken)


def test_no_candidates():
    with pytest.raises(ValueError, match="the tokenizer has 11 entries, the LM head 12 rows.*resize_token_embeddings"):
        choose_value_tokens(Tokenizer(), head(12))
    with pytest.raises(ValueError, match="lm_head is empty"):
        choose_value_tokens(Tokenizer(), torch.empty(0))


@pytest.mark.parametrize(
    ("ids", "story"),
    [
        ((11, 11), "must differ, both are 11"),
        ((11, 20), r"w_minus = 20 is outside the vocabulary \[0, 20\)"),
        ((-1, 11), "w_plus = -1 is outside"),
        ((10, 15), "w_plus = 10 is the end, padding"),
        ((3, 15), "w_plus = 3 occurs in the text"),
        ((12, 15), r"w_plus = 12 is '<split me>', which the tokenizer reads as \["),
        ((11.0, 12), "w_plus must be a Python int"),
        (11, "must be two ids"),
        ((1, 2, 3), "must be two ids"),
    ],
)
def test_ids_that_cannot_serve(ids, story):
    tokenizer = Tokenizer(("<free>", "<split me>"))
    with pytest.raises(ValueError, match=story):
        check_value_tokens(ids, tokenizer=tokenizer, vocab_size=20, token_ids=[0, 3, 5])
    check_value_tokens((11, 19), tokenizer=tokenizer, vocab_size=20, token_ids=[0, 3, 5])


def test_equal_rows_start_at_zero():
    p = cast(problem(1), torch.bfloat16)
    equalize_rows(p["lm_head"].requires_grad_(), p["value_token_ids"], lm_head_bias=p["lm_head_bias"])
    plus, minus = p["value_token_ids"]
    assert torch.equal(p["lm_head"][plus], p["lm_head"][minus])
    v = read_values(
        hidden=p["hidden"],
        lm_head=p["lm_head"],
        lm_head_bias=p["lm_head_bias"],
        value_token_ids=(plus, minus),
        rows=p["v_rows"],
        r_max=10.0,
    )
    assert (v == 0).all()


def test_bans():
    z = torch.randn(3, 2, 7)
    banned = ban_logits(z, (2, 5))
    mask = ban_mask((2, 5), 7)
    assert mask.tolist() == [False, False, True, False, False, True, False]
    assert (banned[..., mask] == -torch.inf).all() and torch.equal(banned[..., ~mask], z[..., ~mask]) and torch.isfinite(z).all()
    config = types.SimpleNamespace(suppress_tokens=[5, 1])
    ban_in_generation_config(config, (2, 5))
    assert config.suppress_tokens == [5, 1, 2]
    config = types.SimpleNamespace()
    ban_in_generation_config(config, (2, 5))
    assert config.suppress_tokens == [2, 5]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        ban_logits(z, (2, 7))


@pytest.mark.parametrize("readout", ["linear", "clip"])
@pytest.mark.parametrize("form", ["hidden", "logits"])
def test_read_values_and_gradient(form, readout):
    p = problem(2, M=9, scale=0.5)
    source = p if form == "hidden" else as_logits(p)
    names = [k for k in ("logits", "hidden", "lm_head", "lm_head_bias") if k in source]
    leaves = [source[k].clone().requires_grad_() for k in names]
    kwargs = {"value_token_ids": p["value_token_ids"], "rows": p["v_rows"], "r_max": 3.0, "tau_v": 2.0, "readout": readout}

    def read(*xs):
        return read_values(**dict(zip(names, xs, strict=True)), **kwargs)

    right = reference.read_values(**dict(zip(names, leaves, strict=True)), **kwargs)
    assert error(read(*leaves).detach(), right.detach()) < 1e-14
    z, (plus, minus) = logits_of(p), p["value_token_ids"]
    plain = (z[p["v_rows"], plus] - z[p["v_rows"], minus]) / 2
    assert torch.allclose(right, 3 * (plain.clamp(-1, 1) if readout == "clip" else plain))
    assert readout == "linear" or ((plain.abs() > 1).any() and (plain.abs() < 1).any())
    assert torch.autograd.gradcheck(read, leaves)


def test_read_values_in_half_types_is_no_worse_than_the_head_itself():
    for dtype in (torch.bfloat16, torch.float16):
        p = cast(problem(3, M=30, T=40, H=64), dtype)
        kwargs = {"value_token_ids": p["value_token_ids"], "rows": p["v_rows"], "r_max": 10.0}
        args = {k: p[k] for k in ("hidden", "lm_head", "lm_head_bias")}
        right = reference.read_values(**{k: v.double() for k, v in args.items()}, **kwargs)
        found, plain = read_values(**args, **kwargs), reference.read_values(**args, **kwargs)
        assert found.dtype == torch.float32 and error(found, right) <= error(plain, right)
        assert error(found, right) < 1e-6, "the difference is taken in float32, not between two rounded logits"
        assert read_values(**args, **{**kwargs, "rows": p["v_rows"][:0]}).shape == (0,)


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"rows": torch.tensor([0, 17])}, r"rows\[1\] = 17 is out of range: logits has 17 rows"),
        ({"r_max": 0.0}, "r_max must be > 0"),
        ({"tau_v": -1.0}, "tau_v must be > 0"),
        ({"readout": "tanh"}, "readout must be one of linear, clip; got 'tanh'"),
        ({"hidden": torch.zeros(17, 6)}, "got both of logits and hidden"),
        ({"value_token_ids": (3, 3)}, "must differ"),
    ],
)
def test_read_values_bad_input(change, story):
    p = as_logits(problem(4))
    right = {"logits": p["logits"], "value_token_ids": p["value_token_ids"], "rows": p["v_rows"], "r_max": 10.0}
    with pytest.raises(ValueError, match=story):
        read_values(**{**right, **change})
