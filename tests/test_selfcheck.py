"""sapo-fast check: right here, and able to say that it is not."""

import pytest
import torch

from sapo_fast import backends, row_pass, selfcheck


def test_every_available_backend_is_right_and_listed():
    table = selfcheck.rows()
    assert all(row.ok for row in table), [row for row in table if not row.ok]
    assert all(row.error < 1e-12 for row in table if row.dtype == "float64")
    listed = {row.backend for row in table if row.device == "cpu"}
    # In these tests Triton's interpreter stands in for a GPU, and serves CPU tensors.
    serving = {x.backend for x in backends.explain() if x.available and (x.backend == "triton" or "cuda" not in x.reason)}
    assert serving == listed
    assert {row.operation for row in table} == {"fused_loss from hidden", "fused_loss from logits", "token_logprobs", "turn_gae"}


@pytest.mark.parametrize("fault", ["temperature", "entropy slope", "nan"])
def test_a_faulty_kernel_is_found(fault, monkeypatch, capsys):
    class Faulty(row_pass.TorchRows):
        def grad(self, logits, rows, actions, stats, a, b, value_token_ids, temperature, out):
            if fault == "temperature":
                temperature = 1.0
            elif fault == "entropy slope":
                b = None
            super().grad(logits, rows, actions, stats, a, b, value_token_ids, temperature, out)
            if fault == "nan":
                out[0, 0] = torch.nan

    backends.explain()
    monkeypatch.setitem(backends._loaded, ("row_pass", "torch"), Faulty())
    assert selfcheck.run() == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_table_is_printed(capsys):
    assert selfcheck.run() == 0
    out = capsys.readouterr().out
    assert "fused_loss from hidden" in out and "bfloat16" in out and "checks, all right" in out
