"""Loading a model from a GGUF file: packed weights become weights that can be trained and saved."""

import importlib.util

import gguf
import numpy as np
import pytest
import torch

from sapo_fast.checkpoint import export_hf
from sapo_fast.config import load_config
from sapo_fast.models.load import load_policy, locate

HIDDEN, MLP, HEADS, KV_HEADS, VOCAB = 32, 64, 4, 2, 320
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Llama of one block in the 8-bit form, as such files come."""
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    texts = [*sorted(ByteLevel.alphabet()), "he", "<|im_start|>", "<|im_end|>"]
    texts += [f"<|reserved_special_token_{i}|>" for i in range(VOCAB - len(texts))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(texts)
    writer.add_token_types([1] * 257 + [3] * (VOCAB - 257))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.Q8_0
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
    shapes |= {"ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    for name, shape in shapes.items():
        packed = gguf.quants.quantize((rng.normal(size=shape) * 0.1).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_loaded_trained_and_exported(file, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = load_policy(load_config(None, [f"model.path={file}", "model.device=cpu"]).model)
    assert policy.tokenizer.encode("he", add_special_tokens=False) == [256] and policy.tokenizer.chat_template == TEMPLATE
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    ids = torch.tensor([[1, 2, 256, 4]])
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy.model(input_ids=ids, labels=ids).loss.backward()
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in policy.model.named_parameters())
    where = export_hf(policy.model, policy.tokenizer, policy.value_token_ids, tmp_path / "model", {})
    again = AutoModelForCausalLM.from_pretrained(where)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_a_folder_with_one_gguf_file_names_it(file):
    assert locate(str(file)) == locate(str(file.parent)) == (file.parent, {"gguf_file": file.name})


def test_without_the_package_the_extra_is_named(file, monkeypatch):
    real = importlib.util.find_spec
    for package in ("gguf", "accelerate"):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest, missing=package: None if name == missing else real(name, *rest)
        )
        with pytest.raises(
            ModuleNotFoundError, match=rf"reading tiny.Q8_0.gguf needs the package {package}: pip install 'sapo_fast\[gguf\]'"
        ):
            locate(str(file))


@pytest.mark.parametrize("what", ["nothing", "a folder without a model", "two files"])
def test_a_path_without_a_model_is_refused(tmp_path, what):
    if what == "two files":
        (tmp_path / "a.gguf").touch()
        (tmp_path / "b.gguf").touch()
    path = tmp_path / "none" if what == "nothing" else tmp_path
    with pytest.raises(ValueError, match="model.path must be 'tiny', a directory with config.json, or a .gguf file"):
        locate(str(path))
