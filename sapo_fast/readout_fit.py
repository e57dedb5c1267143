"""Fit the value readout to what the first episodes returned, in closed form.

A cold (or wrongly warmed) value is SAPO's main failure (method: What goes wrong, 2). V and Q are linear in the hidden state, and the two value rows of
the LM head are outside the policy, so the best readout on the first batch's Monte Carlo returns is a ridge regression that cannot move the policy.

Legend: n value rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

#: Ridge strengths tried, relative to the features' mean square; the last keeps the readout as it is.
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, float("inf"))


@dataclass
class _Moments:
    gram: torch.Tensor  # [H, H] sum of h h'
    cross: torch.Tensor  # [H] sum of h y
    square: float = 0.0  # sum of y^2
    total: float = 0.0  # sum of y
    count: int = 0

    def add(self, h: torch.Tensor, y: torch.Tensor) -> None:
        self.gram += h.T @ h
        self.cross += h.T @ y
        self.square += float(y.square().sum())
        self.total += float(y.sum())
        self.count += len(y)

    def error(self, w: torch.Tensor) -> float:
        """Mean squared error of predicting y by h . w."""
        return float(w @ self.gram @ w - 2 * w @ self.cross + self.square) / max(1, self.count)

    def solve(self, strength: float, start: torch.Tensor) -> torch.Tensor:
        """Least squares pulled towards ``start``."""
        if strength == float("inf"):
            return start
        ridge = strength * self.gram.diagonal().mean().clamp(min=1e-12)
        system = self.gram + ridge * torch.eye(len(start), dtype=start.dtype, device=start.device)
        return start + torch.linalg.solve(system, self.cross - self.gram @ start)


@dataclass
class ReadoutFit:
    """Collects (hidden state, target) pairs in two halves; one half chooses how far to trust the other.

    Halves are cut by trajectory: turns of one episode share their outcome, and must not sit on both sides.
    """

    hidden_size: int
    device: torch.device
    halves: list[_Moments] = field(init=False)

    def __post_init__(self) -> None:
        self.halves = [self._empty(), self._empty()]

    def _empty(self) -> _Moments:
        zeros = torch.zeros(self.hidden_size, self.hidden_size, dtype=torch.float64, device=self.device)
        return _Moments(zeros, zeros[0].clone())

    def add(self, hidden: torch.Tensor, targets: torch.Tensor, trajectory: torch.Tensor) -> None:
        """hidden [n, H], targets [n] (readout units), trajectory [n] index of each row's episode."""
        for parity, half in enumerate(self.halves):
            mine = trajectory % 2 == parity
            half.add(hidden[mine].double(), targets[mine].double())

    def solve(self, start: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The fitted direction [H] and the share of variance that fits of one half explain in the other."""
        start = start.double()
        a, b = self.halves
        errors = [a.error(b.solve(s, start)) + b.error(a.solve(s, start)) for s in STRENGTHS]
        best = min(range(len(STRENGTHS)), key=errors.__getitem__)
        whole = _Moments(a.gram + b.gram, a.cross + b.cross, a.square + b.square, a.total + b.total, a.count + b.count)
        variance = whole.square / max(1, whole.count) - (whole.total / max(1, whole.count)) ** 2
        explained = 1 - errors[best] / 2 / variance if variance > 1e-12 else 0.0
        return whole.solve(STRENGTHS[best], start), explained
