"""vLLM as a server of our own against the trainer's arithmetic, and killed in the middle of a rollout. Run by `make test-vllm`."""

import os
import signal
import threading
import time

import pytest
import torch
from helpers_models import tiny_tokenizer
from test_collector import SleepySuite
from vllm_engine import EXACT, Room, prepare_whole, tiny

from sapo_fast.rollout import vllm_server
from sapo_fast.rollout.collector import Collector
from sapo_fast.rollout.engine import EngineDied, Request, Sampling
from sapo_fast.rollout.prompts import PromptBuilder
from sapo_fast.rollout.vllm_server import RequestRefused, ServerProcess, VLLMServerEngine
from sapo_fast.rollout.weight_sync import WeightMismatch

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def room():
    model = prepare_whole(tiny(tied=True))
    began = time.perf_counter()
    engine = VLLMServerEngine(model, value_token_ids=(513, 514), max_context_tokens=400, max_live=8)
    print(f"\nserver and rehearsal in {time.perf_counter() - began:.1f} s")
    yield Room("server", model, (513, 514), engine, 515)
    engine.close()


def test_logprobs_and_v_are_exact_before_and_after_updates(room):
    before = room.gaps(1.0, seed=1), room.gaps(0.7, seed=2)
    seconds = room.train_steps(5, lr=1e-3)
    after = room.gaps(1.0, seed=1), room.gaps(0.7, seed=2)
    print(f"server: before {before}, after 5 steps {after}; sync and proof {max(seconds):.2f} s at most, {room.engine.last_sync}")
    assert max(*before[0], *before[1], *after[0], *after[1]) <= EXACT


def test_q_is_read_by_one_more_token(room):
    request = room.requests(1, seed=7)[0]
    completion = room.engine.generate([request], Sampling(0.7, 8))[0]
    q, _ = room.engine.ask(Request(9, [*request.prompt_ids, *completion.token_ids], 0), Sampling(1.0, 1))
    assert abs(q.v_logit - room.scored(request.prompt_ids, completion.token_ids, 1.0)[2]) <= EXACT


def test_a_skipped_sync_and_a_skipped_reset_are_seen(room, monkeypatch):
    with torch.no_grad():
        next(room.model.parameters()).view(-1)[7] += 1e-6
    with pytest.raises(WeightMismatch, match="were not synced"):
        room.engine.sync.prove(fresh=False)
    monkeypatch.setattr(room.engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(WeightMismatch, match="in its prefix cache"):
        room.engine.weights_changed()
    monkeypatch.undo()
    room.engine.weights_changed()


def test_a_refused_request_is_no_death(room):
    with pytest.raises(RequestRefused, match="answered 4"):
        room.engine._client.call("POST", "/inference/v1/generate", {"token_ids": [], "sampling_params": {}})


def test_a_server_killed_in_a_rollout_is_started_again_and_the_episodes_are_the_same(room):
    tokenizer = tiny_tokenizer()
    builder = PromptBuilder(tokenizer)
    tasks = [(f"end-{2 + i % 4}", i, i) for i in range(12)]

    def runner():
        return Collector(
            SleepySuite(0.05),
            room.engine,
            builder,
            tokenizer,
            sampling=Sampling(1.0, 6, builder.end_ids),
            max_turns=10,
            max_live=8,
            env_workers=2,
        )

    expected = runner().run(tasks)
    victim = room.engine.server.process
    threading.Timer(0.3, lambda: os.killpg(victim.pid, signal.SIGKILL)).start()
    played = runner()
    began = time.perf_counter()
    found = played.run(tasks)
    print(f"\nkilled, restarted, proved and played in {time.perf_counter() - began:.1f} s")
    assert played.stats.engine_restarts == 1
    assert [[t.response_ids for t in x.turns] for x in found] == [[t.response_ids for t in x.turns] for x in expected]


def test_a_server_that_does_not_start_shows_its_log():
    arguments = {"dtype": "float32", "max_model_len": 64, "no_such_flag": 1}
    server = ServerProcess(tiny(tied=True), arguments, devices=None, cpu=True)
    try:
        with pytest.raises(EngineDied, match=r"(?s)ended with code 2.*no-such-flag"):
            server.wait(vllm_server.HTTPClient(server.url))
    finally:
        server.stop()
