"""docs/api.md: its example runs, and its lists are the code's."""

import re
from pathlib import Path

import torch
from helpers_ops import cast, problem

import sapo_fast
from sapo_fast import LossConfig, fused_loss

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/api.md", "exec"), {})


def test_every_public_name_and_metric_is_on_the_page():
    assert not [n for n in sapo_fast.__all__ if n not in PAGE]
    table = PAGE.split("| metric |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`([a-z_]+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
    assert listed == set(fused_loss(**cast(problem(1), torch.float32)).metrics)


def test_the_printed_defaults_are_the_defaults():
    (text,) = re.findall(r"`(LossConfig\(clip_low=.*?\))`", PAGE, re.DOTALL)
    assert eval(text, {"LossConfig": LossConfig}) == LossConfig()
