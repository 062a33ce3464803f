"""What the engine tells of its work, and that its process reports the speed made of it."""

import threading
import time

import zmq

from cluster.blocks import Namespace, pack_tokens
from cluster.protocol import ModelInfo, Sampling, prefill_pairs
from cluster.settings import WorkerSettings
from tests.worker.recording_runner import ROOT, Rig
from tests.worker.scheduling import prompt_of
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.engine_process import EngineLoop
from worker.messages import (
    Add,
    EngineInfo,
    EngineRequest,
    Stepped,
    Stop,
    decode_from_engine,
    encode,
)
from worker.prefill_speed import Speed, StepWork


def test_pending_pairs_are_those_of_the_tokens_still_to_compute():
    rig = Rig(chunk_tokens=8)
    rig.add("a", prompt_of(20), max_tokens=2)
    rig.add("b", prompt_of(10, first=3), max_tokens=1)
    assert rig.core.load().pending_prefill_pairs == prefill_pairs(0, 20) + prefill_pairs(0, 10)
    rig.step()
    assert rig.core.load().pending_prefill_pairs == prefill_pairs(8, 20) + prefill_pairs(8, 10)
    rig.cancel("b")
    assert rig.core.load().pending_prefill_pairs == prefill_pairs(8, 20)
    rig.drain()
    assert rig.core.load().pending_prefill_pairs == 0
    rig.add("c", [*prompt_of(20), 5], max_tokens=1)
    assert rig.core.load().pending_prefill_pairs == prefill_pairs(20, 21)
    rig.drain()


def test_a_step_tells_what_it_computed():
    rig = Rig(chunk_tokens=8)
    rig.add("a", prompt_of(12), max_tokens=3)
    rig.step()
    assert rig.core.last_work == StepWork(8, prefill_pairs(0, 8), 0, synced=False)
    rig.step()
    assert rig.core.last_work == StepWork(4, prefill_pairs(8, 12), 0, synced=True)
    rig.add("b", prompt_of(6, first=3), max_tokens=1)
    rig.step()
    assert rig.core.last_work == StepWork(6, prefill_pairs(0, 6), 1, synced=True)
    rig.drain()


INFO = EngineInfo(
    model=ModelInfo(
        model="timed",
        namespace=Namespace(
            weights="w", tokenizer="t", kv_dtype="float32", block_size=16, positions="none"
        ),
        tokenizer_json="{}",
        chat_template="",
        special_tokens={},
        context_tokens=999,
    ),
    capacity_blocks=200,
    context_tokens=999,
    max_batch_size=4,
    token_budget=256,
    device="cpu",
    kv_bytes_a_token=1,
    prefill=Speed(4e-3, 2e-8),
)


class TimedRunner:
    """Takes 20 µs a token, and answers 0."""

    def execute(self, batch):
        until = time.perf_counter() + 20e-6 * sum(len(item.token_ids) for item in batch)
        while time.perf_counter() < until:
            pass
        return [0 if item.sample else None for item in batch]


def test_the_engine_process_reports_the_speed_that_it_measures():
    config = EngineConfig(
        block_size=16, capacity_blocks=200, context_tokens=999, max_batch_size=4, token_budget=256
    )
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://engine")
    theirs.connect("inproc://engine")
    loop = EngineLoop(EngineCore(config, TimedRunner()), INFO, WorkerSettings(), theirs)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        speeds = [0.0]
        for number in range(500):  # a disturbed clock shows no speed: go on until one is told
            if number >= 12 and 0.0 < speeds[-1] != 4e-3:
                break
            request = EngineRequest(
                request_id=f"r{number}",
                token_ids=pack_tokens([number + 1] * (100 + 10 * (number % 50))),
                namespace_root=ROOT,
                sampling=Sampling(max_tokens=1, ignore_eos=True),
            )
            ours.send(encode(Add(request)))
            ended = False
            while not ended:
                message = decode_from_engine(ours.recv())
                assert isinstance(message, Stepped)
                speeds.append(message.load.prefill_s_per_token)
                ended = any(output.finish_reason for output in message.outputs)
    finally:
        ours.send(encode(Stop()))
        thread.join()
        ours.close(linger=0)
        theirs.close(linger=0)
        context.term()
    assert speeds[1] == 4e-3
    # how close it comes is for the fit's own tests: here the clock is real
    assert 0.0 < speeds[-1] != 4e-3
