"""docs/api.md and README.md: their examples run, and their lists are the code's."""

import re
from pathlib import Path

import torch
from helpers_ops import cast, problem

import sapo_fast
from sapo_fast import LossConfig, fused_loss

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/api.md", "exec"), {})


def test_the_readme_s_before_and_after_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    before, out = names["logprobs"].detach(), names["out"]
    banned = torch.nn.functional.linear(names["hidden"], names["lm_head"].weight)[:, :98].log_softmax(-1)
    right = banned[names["action_rows"]].gather(1, names["ids"][names["mask"]][:, None])[:, 0].detach()
    assert torch.allclose(out.logprobs, right, atol=1e-6) and (out.logprobs > before).all(), "the same tokens, w+ and w- left out"
    assert torch.isfinite(names["loss"]) and torch.isfinite(out.loss) and all(p.grad is not None for p in names["lm_head"].parameters())


def test_the_commands_and_files_that_the_readme_names_are_there():
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?\bmake ([a-z0-9]+)\b", README)) <= targets
    for path in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"\bconfigs/[a-z0-9]+\.yaml", README):
        assert (ROOT / path).is_file(), path


def test_every_public_name_and_metric_is_on_the_page():
    assert not [n for n in sapo_fast.__all__ if n not in PAGE]
    table = PAGE.split("| metric |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`([a-z_]+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
    assert listed == set(fused_loss(**cast(problem(1), torch.float32)).metrics)


def test_the_printed_defaults_are_the_defaults():
    (text,) = re.findall(r"`(LossConfig\(clip_low=.*?\))`", PAGE, re.DOTALL)
    assert eval(text, {"LossConfig": LossConfig}) == LossConfig()
