"""Checkpoints: exact, whole or absent under SIGKILL, never executed, damaged ones refused by file name; and the exported model."""

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from sapo_fast import checkpoint
from sapo_fast.checkpoint import CheckpointError, copy_into, latest, load, save, unique_tensors


class Tied(nn.Module):
    """Embedding = LM head, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)) * self.scale)


def small(directory, *iterations, keep=10):
    for iteration in iterations:
        tensors = {"policy": {"w": torch.full((8,), float(iteration))}, "optimizer": {"0.step": torch.tensor(1.0)}}
        save(directory, iteration, tensors=tensors, state={"iteration": iteration}, keep=keep)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# ---- what is saved is what is loaded ---------------------------------------------------------------------------------------------------


def test_tensors_and_state_come_back_bitwise(tmp_path):
    tensors = {
        "policy": {
            "f32": torch.randn(3, 5),
            "bf16": torch.randn(7).bfloat16(),
            "i64": torch.arange(4),
            "strided": torch.randn(6, 6)[::2, 1:3],
            "part": torch.arange(10.0)[3:6],
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.5),
        },
        "critic": {},
    }
    state = {"lr": 0.1 + 0.2, "deep": {"list": [1, None, True, "x"], "nan": float("nan")}, "big": 2**200}
    path = save(tmp_path, 12, tensors=tensors, state=state)
    assert path.name == "iteration-000012" and checkpoint.iteration_of(path) == 12
    loaded, loaded_state, iteration = load(path)
    assert iteration == 12 and loaded.keys() == tensors.keys()
    for name, tensor in tensors["policy"].items():
        other = loaded["policy"][name]
        assert other.dtype == tensor.dtype and other.shape == tensor.shape
        assert (
            other.numpy().tobytes() == tensor.contiguous().numpy().tobytes()
            if tensor.dtype != torch.bfloat16
            else torch.equal(other, tensor)
        ), name
    assert loaded_state["lr"] == state["lr"] and loaded_state["big"] == 2**200
    assert loaded_state["deep"]["list"] == [1, None, True, "x"] and np.isnan(loaded_state["deep"]["nan"])


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    assert set(unique_tensors(model)) == {"embed.weight", "body.weight", "body.bias", "scale"}
    save(tmp_path, 1, tensors={"policy": unique_tensors(model)}, state={})
    parameter = other.head.weight
    copy_into(unique_tensors(other), load(latest(tmp_path)).tensors["policy"])
    assert other.head.weight is parameter and other.embed.weight is parameter
    ids = torch.arange(11)
    assert torch.equal(other(ids), model(ids))


def test_one_memory_under_two_names_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'head.weight' and 'embed.weight' are one memory.*unique_tensors"):
        save(tmp_path, 1, tensors={"policy": Tied().state_dict()}, state={})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("scale"), "missing ['scale']"),
        (lambda t: t.update(more=torch.zeros(1)), "unexpected ['more']"),
        (lambda t: t.update({"body.bias": torch.zeros(5)}), "body.bias is (5,)"),
        (lambda t: t.update({"body.bias": torch.zeros(4).double()}), "torch.float64"),
    ],
)
def test_tensors_of_another_model_change_nothing(change, told):
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name: tensor + 1 for name, tensor in unique_tensors(Tied()).items()}
    change(tensors)
    with pytest.raises(ValueError) as caught:
        copy_into(unique_tensors(model), tensors)
    assert told in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_training_goes_on_bitwise_after_a_round_trip_of_the_optimizer(tmp_path, amsgrad):
    def make():
        torch.manual_seed(0)
        model = Tied()
        groups = [{"params": [model.embed.weight], "lr": 1e-2}, {"params": model.body.parameters(), "weight_decay": 0.1}]
        return model, torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9), amsgrad=amsgrad)

    def steps(model, optimizer, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            model(torch.randint(11, (6,), generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, optimizer = make()
    steps(straight, optimizer, range(3))
    tensors, settings = checkpoint.optimizer_to_tensors(optimizer)
    assert all(tensor.numel() for tensor in tensors.values()) and len(tensors) == (4 if amsgrad else 3) * 3
    save(tmp_path, 3, tensors={"policy": unique_tensors(straight), "optimizer": tensors}, state={"optimizer": settings})
    steps(straight, optimizer, range(3, 6))

    resumed, other = make()
    for group in other.param_groups:
        group["lr"] = 7.0  # must be overwritten by the saved one
    loaded, state, _ = load(latest(tmp_path))
    copy_into(unique_tensors(resumed), loaded["policy"])
    checkpoint.optimizer_from_tensors(other, loaded["optimizer"], state["optimizer"])
    assert [group["lr"] for group in other.param_groups] == [1e-2, 3e-3] and other.param_groups[0]["betas"] == (0.8, 0.9)
    steps(resumed, other, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_an_optimizer_that_never_stepped_and_one_of_another_model(tmp_path):
    fresh = torch.optim.AdamW(Tied().parameters())
    tensors, settings = checkpoint.optimizer_to_tensors(fresh)
    assert tensors == {}
    checkpoint.optimizer_from_tensors(torch.optim.AdamW(Tied().parameters()), tensors, settings)
    with pytest.raises(ValueError, match="has 3 parameters in 1 groups, this one 2 in 1"):
        checkpoint.optimizer_from_tensors(torch.optim.AdamW(nn.Linear(2, 2).parameters()), tensors, settings)
    with pytest.raises(ValueError, match=r"0.exp_avg is \(5,\), its parameter \(11, 4\)"):
        checkpoint.optimizer_from_tensors(fresh, {"0.exp_avg": torch.zeros(5)}, settings)


def test_generators_go_on_where_they_were(tmp_path):
    own = [torch.Generator().manual_seed(3), np.random.default_rng(4), np.random.Generator(np.random.MT19937(5)), random.Random(6)]

    def draw():
        globals_ = [
            torch.rand(3).tolist(),
            torch.randn(3).tolist(),
            np.random.standard_normal(3).tolist(),
            random.random(),
            random.gauss(0, 1),
        ]
        return globals_ + [
            torch.rand(2, generator=own[0]).tolist(),
            own[1].random(2).tolist(),
            own[2].random(2).tolist(),
            own[3].gauss(0, 1),
        ]

    checkpoint.seed_all(2**40 + 7)
    first = draw()[:5]
    checkpoint.seed_all(2**40 + 7)
    assert draw()[:5] == first
    draw()  # leaves a second normal cached in numpy's and Python's generators
    state = {"rng": checkpoint.rng_state(), "own": [checkpoint.generator_state(generator) for generator in own]}
    save(tmp_path, 0, tensors={}, state=state)
    expected = [draw(), draw()]
    loaded = load(latest(tmp_path)).state
    checkpoint.set_rng_state(loaded["rng"])
    for generator, saved in zip(own, loaded["own"], strict=True):
        checkpoint.set_generator_state(generator, saved)
    assert [draw(), draw()] == expected


# ---- which checkpoints there are -------------------------------------------------------------------------------------------------------


def test_the_last_n_are_kept(tmp_path):
    small(tmp_path, 2, 4, 6, 8, keep=2)
    assert names(tmp_path) == ["iteration-000006", "iteration-000008"]
    assert latest(tmp_path).name == "iteration-000008"


def test_iterations_are_ordered_as_numbers(tmp_path):
    small(tmp_path, 999_999, 1_000_000)
    assert latest(tmp_path).name == "iteration-1000000"


def test_saving_an_iteration_again_replaces_it_without_a_moment_of_absence(tmp_path):
    small(tmp_path, 1, 2)
    save(tmp_path, 2, tensors={}, state={"again": 1})
    assert names(tmp_path) == ["iteration-000001", "iteration-000002-1"]
    save(tmp_path, 2, tensors={}, state={"again": 2})
    assert load(latest(tmp_path)).state == {"again": 2}


def test_an_abandoned_continuation_is_not_picked_up(tmp_path):
    small(tmp_path, 10, 20, 30)
    small(tmp_path, 15)  # resumed from 10 by hand
    assert names(tmp_path) == ["iteration-000010", "iteration-000015"]


def test_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "absent") is None
    (tmp_path / "iteration-foo").mkdir()
    (tmp_path / ".tmp-iteration-000001-77").mkdir()
    assert latest(tmp_path) is None
    small(tmp_path, 1)
    assert names(tmp_path) == ["iteration-000001", "iteration-foo"]  # what a killed process left is cleared away


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"state": {"x": {"y": torch.zeros(1)}}}, "state.x.y is a Tensor"),
        ({"state": {"x": [np.float64(1)]}}, r"state.x\[0\] is a float64"),
        ({"state": {"x": {1: 2}}}, "state.x has the key 1"),
        ({"tensors": {"../x": {}}}, "'../x'"),
        ({"iteration": -1}, "got -1"),
        ({"keep": 0}, "got 1 and 0"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, arguments, told):
    with pytest.raises(ValueError, match=told):
        save(tmp_path / "new", **{"iteration": 1, "tensors": {}, "state": {}, **arguments})
    assert not (tmp_path / "new").exists()


def test_a_failed_save_leaves_the_earlier_checkpoint_and_no_rest(tmp_path, monkeypatch):
    small(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        small(tmp_path, 2)
    assert names(tmp_path) == ["iteration-000001"]


# ---- damage ----------------------------------------------------------------------------------------------------------------------------


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [flip, cut, lambda file: file.unlink(), lambda file: file.write_bytes(b"")], ids=["flip", "cut", "missing", "empty"]
)
def test_a_damaged_checkpoint_is_refused_by_file_name_and_the_one_before_is_used(tmp_path, caplog, name, damage):
    small(tmp_path, 1, 2)
    damage(tmp_path / "iteration-000002" / name)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "iteration-000002")
    assert str(tmp_path / "iteration-000002" / name) in str(caught.value) or name == "manifest.json"
    assert "iteration-000002" in str(caught.value)
    if damage is cut and name != "manifest.json":
        assert "bytes instead of" in str(caught.value)
    assert latest(tmp_path).name == "iteration-000001"
    assert "iteration-000002" in caplog.text and caplog.records[0].levelname == "WARNING"
    assert float(load(latest(tmp_path)).tensors["policy"]["w"][0]) == 1.0


def test_if_all_are_damaged_nothing_starts_anew_by_itself(tmp_path):
    small(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        cut(path / "policy.safetensors")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged") as caught:
        latest(tmp_path)
    assert str(caught.value).count("policy.safetensors") == 2


def test_a_manifest_cannot_lead_outside_its_directory(tmp_path):
    small(tmp_path, 1)
    secret = tmp_path / "secret.safetensors"
    shutil.copy(tmp_path / "iteration-000001" / "policy.safetensors", secret)
    file = tmp_path / "iteration-000001" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["../secret.safetensors"] = manifest["files"]["policy.safetensors"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="secret.safetensors"):
        load(tmp_path / "iteration-000001")


def test_another_format_is_named(tmp_path):
    small(tmp_path, 1)
    file = tmp_path / "iteration-000001" / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="is of format 2, this version reads 1"):
        load(tmp_path / "iteration-000001")


class Bomb:
    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def test_a_pickle_in_the_directory_is_never_executed(tmp_path):
    sentinel = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(sentinel))
    directory = tmp_path / "checkpoints"
    small(directory, 1, 2)
    # beside the checkpoint's files, under every name that a loader might like
    for name in ("state.pkl", "optimizer.pt", "policy.bin", "pytorch_model.bin", ".metadata", "__init__.py"):
        (directory / "iteration-000002" / name).write_bytes(bomb)
    assert load(latest(directory)).iteration == 2
    # in the place of one of them, with a manifest that vouches for it
    for iteration, name in ((1, "policy.safetensors"), (2, "state.json")):
        where = directory / f"iteration-{iteration:06d}"
        (where / name).write_bytes(bomb)
        manifest = json.loads((where / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
        (where / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=name):
            load(where)
    assert not sentinel.exists()
    pickle.loads(bomb)
    assert sentinel.exists()  # the bomb works: it was really never lit above


SAVERS = """
import os, sys
import torch
from sapo_fast.checkpoint import save
import safetensors.torch
torch.set_num_threads(1)
for line in sys.stdin:  # torch is imported once; every saver is a fork that saves for ever
    iteration = int(line)
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        while True:
            iteration += 1
            named = {f"w{i}": torch.full((50_000,), float(iteration)) for i in range(4)}
            state = {"iteration": iteration, "text": "x" * 100_000}
            save(sys.argv[1], iteration, tensors={"policy": named, "optimizer": named}, state=state)
            print(iteration, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_killed_at_random_instants_while_saving_the_last_finished_checkpoint_always_loads(tmp_path):
    rng = random.Random()
    done, interrupted = 0, 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVERS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as savers:
        for _ in range(20):
            savers.stdin.write(f"{done}\n")
            savers.stdin.flush()
            pid = int(savers.stdout.readline())
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(pid, signal.SIGKILL)
            while (line := savers.stdout.readline().strip()) != "dead":
                done = int(line)
            interrupted += any(path.name.startswith(".tmp") for path in tmp_path.iterdir())
            where = latest(tmp_path)
            if where is None:
                assert done == 0
                continue
            tensors, state, iteration = load(where)
            assert iteration in (done, done + 1) and state["iteration"] == iteration  # what save() returned for is never lost
            assert all(bool((tensor == iteration).all()) for group in tensors.values() for tensor in group.values())
            done = iteration
        savers.stdin.close()
    assert done > 0 and interrupted > 0  # the kills did fall into saves
    # A kill may fall between a save and the deletion of older ones; the next save that lives tidies up after all of them.
    save(tmp_path, done + 1, tensors={"policy": {"w": torch.zeros(3)}}, state={}, keep=2)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("iteration")]) == 2


# ---- export ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=12, tie_word_embeddings=True, max_position_embeddings=64, **sizes)).eval()
    vocabulary = {f"t{i}": i for i in range(10)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), eos_token="t1", pad_token="t2"
    )
    return model, tokenizer


SIDE = {"r_max": 10.0, "tau_v": 1.0, "readout": "linear", "trained_readout": True}


def test_an_export_gives_the_same_logits_and_never_says_the_value_tokens(tmp_path, hf):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = hf
    with torch.no_grad():
        model.lm_head.weight[10:] *= 50  # a model that would say little else
    where = checkpoint.export_hf(model, tokenizer, (10, 11), tmp_path / "model", SIDE)
    other = AutoModelForCausalLM.from_pretrained(where).eval()
    ids = torch.randint(10, (3, 9))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)
        torch.manual_seed(1)
        free = model.generate(ids, do_sample=True, max_new_tokens=20, min_new_tokens=20)[:, 9:]
        banned = other.generate(ids, do_sample=True, max_new_tokens=20, min_new_tokens=20)[:, 9:]
    assert (free >= 10).any() and not (banned >= 10).any()
    assert model.generation_config.suppress_tokens is None  # the live model's own settings are untouched
    assert json.loads((where / "sapo_fast.json").read_text()) == {"value_token_ids": [10, 11], **SIDE}
    assert AutoTokenizer.from_pretrained(where).convert_tokens_to_ids("t3") == 3
    assert not [path for path in where.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_an_export_replaces_an_earlier_one_and_nothing_else(tmp_path, hf):
    model, tokenizer = hf
    where = checkpoint.export_hf(model, tokenizer, (10, 11), tmp_path / "model", SIDE)
    (where / "old").write_text("")
    checkpoint.export_hf(model, tokenizer, (10, 11), where, SIDE)
    assert not (where / "old").exists() and names(tmp_path) == ["model"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(ValueError, match="new or empty directory"):
            checkpoint.export_hf(model, tokenizer, (10, 11), target, SIDE)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
