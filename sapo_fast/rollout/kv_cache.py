"""The keys and values of live episodes, kept between turns: a slot for each episode, every token at its own position.

No padding and no holes: token p of an episode lies at position p of its slot, so the next turn computes only what is new, and a
prompt that diverges from what the slot holds overwrites from there on. What lies beyond a row's length is stale but finite, and
masked.

Legend: S slots, C capacity of a slot in tokens, N new tokens of one forward (rows one after the other), n rows, s new tokens of a
row, D head dim.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_MASK_ELEMENTS = 1 << 22  # a group's mask has at most so many entries (16 MiB in float32), unless a single row needs more


class KVArena:
    """Slots for episodes. ``held[slot, :lengths[slot]]`` are the ids whose keys and values the slot holds."""

    def __init__(self, max_slots: int, max_tokens: int) -> None:
        self.max_slots, self.max_tokens = max_slots, max_tokens
        self.slots, self.capacity = 0, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [S, kv_heads, C, D]
        self.held = np.zeros((0, 0), dtype=np.int64)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.evictions = 0
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._free: list[int] = []

    def acquire(self, keys: Sequence[int]) -> np.ndarray:
        """The slots of ``keys`` (at most ``max_slots``, all different), [n]. New keys get empty slots; the longest unused make room."""
        for key in keys:
            if key in self._slot_of:
                self._slot_of.move_to_end(key)
        missing = [key for key in keys if key not in self._slot_of]
        if len(missing) > len(self._free) and self.slots < self.max_slots:
            wanted = len(self._slot_of) + len(missing)
            self._resize(min(self.max_slots, max(wanted, 2 * self.slots)), self.capacity)
        for key in missing:
            if not self._free:
                self.release([next(iter(self._slot_of))])
                self.evictions += 1
            self._slot_of[key] = heapq.heappop(self._free)  # lowest first: live slots stay close together
        return np.array([self._slot_of[key] for key in keys], dtype=np.int64)

    def release(self, keys: Iterable[int]) -> None:
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self.lengths[slot] = 0
                heapq.heappush(self._free, slot)

    def clear(self) -> None:
        """Forget every episode, and keep the memory."""
        self.release(list(self._slot_of))

    def discard(self) -> None:
        """Forget everything, memory included: a NaN must not stay behind a mask (0 x NaN is NaN)."""
        self.clear()
        self.layers.clear()

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens a slot."""
        if tokens > self.capacity:
            grown = max(64, self.capacity)  # always a multiple of 8, so that a group's keys can be rounded up to one
            while grown < tokens:
                grown *= 2
            self._resize(self.slots, min(grown, -(-self.max_tokens // 8) * 8))

    def _resize(self, slots: int, capacity: int) -> None:
        held = np.zeros((slots, capacity), dtype=np.int64)
        held[: self.slots, : self.capacity] = self.held
        lengths = np.zeros(slots, dtype=np.int64)
        lengths[: self.slots] = self.lengths
        for layer, (keys, values) in self.layers.items():
            pair = []
            for old in (keys, values):
                new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                new[: self.slots, :, : self.capacity] = old
                pair.append(new)
            self.layers[layer] = (pair[0], pair[1])
        for slot in range(self.slots, slots):
            heapq.heappush(self._free, slot)
        self.held, self.lengths, self.slots, self.capacity = held, lengths, slots, capacity

    def common_prefix(self, slot: int, prompt: np.ndarray) -> int:
        """How many leading tokens of ``prompt`` the slot holds; one less than all at most, since the last must be run for its logits."""
        limit = min(int(self.lengths[slot]), len(prompt) - 1)
        differs = self.held[slot, :limit] != prompt[:limit]
        return int(differs.argmax()) if differs.any() else limit

    def hold(self, slot: int, start: int, ids: np.ndarray) -> None:
        """Note that the slot holds its first ``start`` tokens and then ``ids``."""
        self.held[slot, start : start + len(ids)] = ids
        self.lengths[slot] = start + len(ids)

    def copy_prefix(self, source: int, targets: np.ndarray, tokens: int) -> None:
        """Give the first ``tokens`` tokens of one slot to others."""
        for pair in self.layers.values():
            for tensor in pair:
                index = torch.from_numpy(targets).to(tensor.device)
                tensor[index, :, :tokens] = tensor[source, :, :tokens]
        self.held[targets, :tokens] = self.held[source, :tokens]
        self.lengths[targets] = tokens

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, made for the shape, dtype and device of what will be stored."""
        if index not in self.layers:
            keys, values = (x.new_zeros(self.slots, x.shape[1], self.capacity, x.shape[3]) for x in (key, value))
            self.layers[index] = (keys, values)
        return self.layers[index]


class _Group:
    """Rows of similar length that attend in one call."""

    def __init__(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, first_token: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.new = len(slots), int(counts.max())
        self.tokens = slice(first_token, first_token + int(counts.sum()))
        self.keys = -(-int((starts + counts).max()) // 8) * 8  # a multiple of 8 suits vector units and CUDA's mask alignment
        self.causal = bool((starts == 0).all())
        uniform = bool((counts == self.new).all())
        self.pad: Tensor | None = None  # [rows * new]: which token of the group stands there; [tokens]: where each token ended up
        self.unpad: Tensor | None = None
        if not uniform:
            within = np.minimum(np.arange(self.new), counts[:, None] - 1)
            offsets = np.concatenate(([0], np.cumsum(counts)[:-1]))
            self.pad = torch.from_numpy((offsets[:, None] + within).ravel()).to(device)
            self.unpad = torch.from_numpy(np.flatnonzero((np.arange(self.new) < counts[:, None]).ravel())).to(device)
        low, high = int(slots.min()), int(slots.max()) + 1
        self.span = slice(low, high)
        self.select: Tensor | None = None  # slots to copy out, where they do not lie side by side
        self.spread: Tensor | None = None  # or, cheaper for one query a row: where each row lies in the span, gaps attending for nothing
        if not np.array_equal(slots, np.arange(low, high)):
            if self.new == 1 and high - low <= 2 * self.rows:
                self.spread = torch.from_numpy(slots - low).to(device)
            else:
                self.select = torch.from_numpy(slots).to(device)
        self.mask: Tensor | None = None
        if not self.causal:
            positions = torch.from_numpy(starts[:, None] + np.arange(self.new)).to(device)
            hidden = torch.arange(self.keys, device=device) > positions[:, :, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            self.mask = mask[:, None]  # [rows, 1, new, keys]
            if self.spread is not None:
                self.mask = mask.new_zeros(high - low, 1, self.new, self.keys).index_copy_(0, self.spread, self.mask)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """query [tokens of the group, heads, D] against the arena's keys, values [S, kv_heads, C, D] -> [tokens of the group, heads, D]."""
        heads, kv_heads = query.shape[1], keys.shape[1]
        if self.pad is not None:
            query = query.index_select(0, self.pad)
        query = query.view(self.rows, self.new, heads, -1)
        if self.spread is not None:
            query = query.new_zeros(self.span.stop - self.span.start, *query.shape[1:]).index_copy_(0, self.spread, query)
        rows = query.shape[0]
        used = self.new if self.causal else self.keys
        if self.select is not None:
            keys, values = (x[:, :, :used].index_select(0, self.select) for x in (keys, values))
        else:
            keys, values = (x[self.span, :, :used] for x in (keys, values))
        if self.mask is None:
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
            )
        else:
            # The query heads that share a key-value head become further queries of it: nothing is repeated, and CUDA keeps its
            # fast kernels.
            shared = heads // kv_heads
            query = query.view(rows, self.new, kv_heads, shared, -1).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, shared * self.new, -1)
            mask = self.mask if shared == 1 or self.new == 1 else self.mask.repeat(1, 1, shared, 1)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
            out = out.view(rows, heads, self.new, -1)
        out = out.transpose(1, 2)
        if self.spread is not None:
            out = out.index_select(0, self.spread)
        out = out.reshape(self.rows * self.new, heads, -1)
        return out if self.unpad is None else out.index_select(0, self.unpad)


class ArenaLayout:
    """One forward of new tokens: they are written to their slots, then attend to what their slot holds up to themselves.

    slots, starts, counts [n] int64: row i brings counts[i] new tokens at positions starts[i], starts[i] + 1, ... of slot
    slots[i]; rows lie one after the other in the forward's single sequence. Rows sorted by count make tight groups.
    """

    def __init__(self, arena: KVArena, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, dtype: torch.dtype, device: torch.device):
        self.arena = arena
        self.max_context = int((starts + counts).max())
        self.last = np.cumsum(counts) - 1  # [n]: where each row's last token lies in the sequence
        begin = self.last + 1 - counts
        self._slot = np.repeat(slots, counts)
        self.positions = np.arange(counts.sum()) - np.repeat(begin - starts, counts)  # [N]
        self._device = device
        self._destinations: dict[int, Tensor] = {}
        self._groups = []
        limit = _MASK_ELEMENTS if starts.any() else np.inf  # rows that start at 0 need no mask
        row = 0
        while row < len(slots):
            stop, most, longest = row + 1, int(counts[row]), int(starts[row] + counts[row])
            while stop < len(slots) and counts[row] - 8 <= counts[stop] <= counts[row] * 1.25 + 8:
                most, longest = max(most, int(counts[stop])), max(longest, int(starts[stop] + counts[stop]))
                if (stop + 1 - row) * most * longest > limit:
                    break
                stop += 1
            part = slice(row, stop)
            self._groups.append(_Group(slots[part], starts[part], counts[part], int(begin[row]), dtype, device))
            row = stop

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        keys, values = self.arena.layer(layer, key, value)
        where = self._destination(keys.shape[1])
        for store, new in ((keys, key), (values, value)):
            store.view(-1, store.shape[3]).index_copy_(0, where, new[0].transpose(0, 1).reshape(-1, new.shape[3]))
        query = query[0].transpose(0, 1)  # [N, heads, D]
        outputs = [group.attend(query[group.tokens], keys, values, scale) for group in self._groups]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def _destination(self, kv_heads: int) -> Tensor:
        """Row of the arena, seen as [S * kv_heads * C, D], of every (token, head): [N * kv_heads]."""
        if kv_heads not in self._destinations:
            head_rows = self._slot[:, None] * kv_heads + np.arange(kv_heads)
            flat = (head_rows * self.arena.capacity + self.positions[:, None]).ravel()
            self._destinations[kv_heads] = torch.from_numpy(flat).to(self._device)
        return self._destinations[kv_heads]
