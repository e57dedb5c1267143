"""The package: what importing it needs, what a wheel and a source distribution hold, and the house rules that a machine can check."""

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = (
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "yaml",
    "tqdm",
    "tensorboard",
    "matplotlib",
    "gguf",
    "triton",
    "wandb",
    "vllm",
)
ONLY_TORCH = f"""
import importlib.machinery, sys
real = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in {EXTRAS} else real(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""


def python(code, *arguments, cwd=None):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd)


def test_importing_the_package_needs_torch_alone():
    done = python(
        ONLY_TORCH + "import torch, sapo_fast\n"
        "assert not any(name.startswith(('sapo_fast.cli', 'sapo_fast.config', 'sapo_fast.trainer')) for name in sys.modules)\n"
        "missing = [name for name in sapo_fast.__all__ if not hasattr(sapo_fast, name)]\n"
        "assert not missing, missing\n"
        "logits = torch.randn(4, 12, requires_grad=True)\n"
        "out = sapo_fast.fused_loss(logits=logits, value_token_ids=(10, 11), action_rows=torch.tensor([0, 1]),\n"
        "    actions=torch.tensor([2, 3]), old_logprobs=torch.full((2,), -2.0),\n"
        "    advantages=torch.tensor([1.0, -1.0]), config=sapo_fast.LossConfig(kl_coef=0.0))\n"
        "out.loss.backward(); print(bool(logits.grad.abs().sum() > 0))\n"
    )
    assert done.stdout.strip().endswith("True"), done.stderr


def test_env_and_check_work_with_torch_alone_and_train_names_the_extra():
    env = python(ONLY_TORCH + "from sapo_fast.cli import main; sys.exit(main(['env']))")
    assert env.returncode == 0, env.stderr
    assert "backends" in env.stdout and "row_pass" in env.stdout
    check = python(ONLY_TORCH + "from sapo_fast.cli import main; sys.exit(main(['check']))")
    assert check.returncode == 0 and "turn_gae" in check.stdout, check.stderr
    train = python(ONLY_TORCH + "from sapo_fast.cli import main; sys.exit(main(['train']))")
    assert train.returncode == 2 and "pip install 'sapo_fast[train]'" in train.stderr and "Traceback" not in train.stderr


def test_matplotlib_is_not_imported_for_training():
    done = python("import sys, sapo_fast.trainer, sapo_fast.cli, sapo_fast.report; sys.exit('matplotlib' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what git tracks (and what is about to be added), as a clone would have it."""
    folder = tmp_path_factory.mktemp("clone") / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.fail(f"the packaging tests run in a git checkout: {listed.stderr}")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not (path.exists() or path.is_symlink()):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        else:
            target.write_bytes(path.read_bytes())
    return folder


def build(source, out, kind):
    """Build without a compiler: what is tested is what is packed, and that no compiler is needed."""
    environment = {"PATH": "/nonexistent", "CXX": "/nonexistent/c++", "HOME": str(out)}
    code = f"import setuptools.build_meta as backend, sys; print(backend.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.strip().splitlines()[-1], done.stderr


def test_a_wheel_holds_sapo_fast_alone_and_every_module(source, tmp_path):
    wheel, output = build(source, tmp_path, "wheel")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"sapo_fast", "sapo_fast-0.1.0.dist-info"}
    # glob does not follow the link sapo_fast/kernels
    modules = {str(path.relative_to(source)) for path in (source / "sapo_fast").rglob("*.py")}
    modules |= {f"sapo_fast/kernels/{path.name}" for path in (source / "kernels").glob("*.py")}
    assert modules and {name for name in names if name.endswith(".py")} == modules
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "not built" in output  # and the reason
    metadata = zipfile.ZipFile(wheel).read("sapo_fast-0.1.0.dist-info/METADATA").decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert len(required) == 2 and "torch" in required[0] and "numpy" in required[1]

    done = python("import sapo_fast, sys; print(sapo_fast.__file__); sapo_fast.LossConfig()", cwd=unpacked(wheel, tmp_path / "site"))
    assert str(tmp_path) in done.stdout, done.stderr


def unpacked(wheel, folder):
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_a_source_distribution_can_be_built_from_again(source, tmp_path):
    archive, _ = build(source, tmp_path, "sdist")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
        tar.extractall(tmp_path / "unpacked", filter="data")
    for name in (
        "pyproject.toml",
        "setup.py",
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "Makefile",
        "configs/demo.yaml",
        "docs/configuration.md",
    ):
        assert name in names, name
    assert {str(path.relative_to(source)) for path in (source / "csrc").rglob("*") if path.is_file()} <= names
    wheel, _ = build(next((tmp_path / "unpacked").iterdir()), tmp_path, "wheel")
    assert "sapo_fast/loss.py" in zipfile.ZipFile(wheel).namelist()


def python_files():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def test_arrows_go_one_way():
    """cli -> trainer -> {algorithms, batch, rollout, envs, models} -> {loss, logprobs, advantage, value_tokens} -> backends."""
    forbidden = {
        "envs": {"models", "rollout", "loss", "trainer", "algorithms", "batch", "cli", "config", "learner"},
        "rollout": {"loss", "trainer", "algorithms", "cli", "learner", "advantage", "batch"},
        "loss.py logprobs.py advantage.py value_tokens.py backends.py checks.py reference.py row_pass.py": {
            "trainer", "algorithms", "batch", "rollout", "envs", "models", "cli", "config", "learner", "checkpoint", "trackers"
        },
        "models algorithms.py batch.py learner.py config.py config_schema.py checkpoint.py trackers.py": {
            "trainer", "cli", "compare", "report"
        },
    }  # fmt: skip
    seen = 0
    for path in python_files():
        parts = path.relative_to(ROOT).parts
        if parts[0] != "sapo_fast":
            continue
        banned = set().union(*(rooms for where, rooms in forbidden.items() if parts[1] in where.split()))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sapo_fast"):
                targets = {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
                seen += 1
                assert not targets & banned, f"{path.relative_to(ROOT)}:{node.lineno} imports {targets & banned}"
    assert seen > 30


def test_nothing_unpickles_or_trusts_remote_code():
    for path in python_files():
        if path.relative_to(ROOT).parts[0] not in ("sapo_fast", "kernels", "examples", "bench"):
            continue
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        assert not names & {"pickle", "shelve", "marshal", "dill"}, path
        loads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "load" and getattr(n.value, "id", "") == "torch"]
        assert not loads, f"{path}: torch.load unpickles"
        assert "trust_remote_code=True" not in path.read_text(), path


def test_the_makefile_and_ci_are_well_formed():
    for script in ("run", "tests", "wheel", "smoke"):
        subprocess.run(["bash", "-n", str(ROOT / ".ci" / script)], check=True)
        text = (ROOT / ".ci" / script).read_text()
        assert "set -euo pipefail" in text and text.startswith("#!/usr/bin/env bash")
    for target in ("demo", "test", "lint", "wheel", "clean"):
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)
