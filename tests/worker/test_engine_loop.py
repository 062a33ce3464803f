"""When the engine process gives up: where nothing can be computed, not where requests are bad."""

from __future__ import annotations

import pytest
import zmq

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from cluster.settings import WorkerSettings
from tests.worker.recording_runner import ROOT, Rig
from tests.worker.test_step_work import INFO
from worker.engine_process import DEAD_STEPS_TO_GIVE_UP, EngineLoop
from worker.messages import Add, EngineRequest, Stepped, Stop, decode_from_engine, encode


class Socket:
    """Hands over one message at a time, each once the engine has nothing left to do."""

    def __init__(self, rig: Rig, messages: list[Add | Stop]) -> None:
        self.rig = rig
        self.messages = messages
        self.sent: list[object] = []
        self.taken = False

    def poll(self, _wait_ms: int) -> bool:
        self.taken = False
        return not self.rig.core.has_work() and bool(self.messages)

    def recv(self, _flags: int) -> bytes:
        if self.taken:
            raise zmq.Again
        self.taken = True
        message = self.messages.pop(0)
        if isinstance(message, Add):
            prompt = [1, 2, 3]
            self.rig.runner.expect(message.request, prompt)
        return encode(message)

    def send(self, raw: bytes) -> None:
        self.sent.append(decode_from_engine(raw))


def add(request_id: str) -> Add:
    sampling = Sampling(max_tokens=2, seed=0, ignore_eos=True)
    return Add(
        EngineRequest(
            request_id=request_id,
            token_ids=pack_tokens([1, 2, 3]),
            namespace_root=ROOT,
            sampling=sampling,
        )
    )


def loop_of(rig: Rig, messages: list[Add | Stop]) -> tuple[EngineLoop, Socket]:
    socket = Socket(rig, messages)
    return EngineLoop(rig.core, INFO, WorkerSettings(model="m"), socket), socket  # type: ignore[arg-type]


def ends(socket: Socket) -> dict[str, str]:
    steps = [message for message in socket.sent if isinstance(message, Stepped)]
    outputs = [output for step in steps for output in step.outputs if output.finish_reason]
    return {output.request_id: output.finish_reason for output in outputs}


def test_any_number_of_bad_requests_leaves_the_engine_at_work():
    rig = Rig()
    bad = [f"bad {number}" for number in range(3 * DEAD_STEPS_TO_GIVE_UP)]
    rig.runner.bad = {name: ValueError("cannot be computed") for name in bad}
    loop, socket = loop_of(rig, [*map(add, bad), add("good"), Stop()])
    loop.run()
    assert ends(socket) == dict.fromkeys(bad, "error") | {"good": "length"}


def test_an_engine_in_which_nothing_can_be_computed_ends():
    rig = Rig()
    rig.runner.broken = RuntimeError("the accelerator fell over")
    loop, socket = loop_of(rig, [add(f"r{number}") for number in range(9)])
    with pytest.raises(RuntimeError, match=r"3 steps in a row have failed: .*fell over"):
        loop.run()
    assert len(ends(socket)) == DEAD_STEPS_TO_GIVE_UP
