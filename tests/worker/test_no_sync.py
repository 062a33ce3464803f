"""Nothing in a step makes the host wait for the device, but reading the sampled tokens.

On the device "meta", whose tensors have shapes but no values: whatever would need a value on the
host (`item`, `tolist`, `nonzero`, a boolean index, `if tensor`) or would copy one there fails.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.protocol import Sampling
from tests.worker.static_attention import StaticBackend
from tests.worker.tiny_models import item, random_tensors, tiny_config
from worker.decode_graphs import eager
from worker.models import LlamaModel
from worker.runner import TorchRunner
from worker.sampler import Draw, sample
from worker.staging import staging_buffer, upload

DEVICE = torch.device("meta")


class Synchronised(Exception):
    """Something would have made the host wait."""


class NoWayBack(TorchDispatchMode):
    """Refuses what takes a tensor of the device and gives one on the host, and copies to the
    device that the host waits for.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        sources = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if func is torch.ops.aten.copy_.default:
            sources = sources[1:]
        from_device = any(source.is_meta for source in sources)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            if from_device and not out.is_meta:
                raise Synchronised(f"{func} gives a tensor on the host")
            queued = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if copies and out.is_meta and not from_device and not queued:
                raise Synchronised(f"{func} waits for a copy to the device")
        return out


def meta_runner():
    config = tiny_config()
    model = LlamaModel(config, random_tensors(config), torch.bfloat16, DEVICE)
    return TorchRunner(model, 24, 16, "sdpa")


BATCH = [
    item([5], 40, [5, 3, 9]),
    item([6], 3, [2]),
    item(list(range(1, 30)), 0, [7, 8]),
    item(list(range(20)), 17, [10, 11, 12]),
    item([1, 2, 3], 0, [13], sample=False),
]


@pytest.fixture
def reads(monkeypatch):
    """Shapes of what `execute` read; it gets sevens."""
    shapes = []
    monkeypatch.setattr(
        "worker.runner.read_back",
        lambda tokens: shapes.append(tuple(tokens.shape)) or [7] * len(tokens),
    )
    return shapes


def test_a_step_of_decodes_and_chunks_reads_its_tokens_only(reads):
    runner = meta_runner()
    with NoWayBack():
        assert runner.execute(BATCH) == [7, 7, 7, 7, None]
    assert reads == [(4,)]


def test_a_replayed_step_reads_its_tokens_only(reads):
    runner = meta_runner()
    runner._backend = StaticBackend()
    runner.capture_decodes(4, 64, eager)
    with NoWayBack():
        assert runner.execute([*BATCH[:2], item([1], 0, [4])]) == [7, 7, 7]
    assert reads == [(3,)]
    assert runner._backend.plans == 3, "one for each captured size"


def test_what_goes_to_a_gpu_goes_through_pinned_memory_and_is_not_waited_for(monkeypatch):
    """Without a GPU: what is asked of torch is noted."""
    asked = []

    def empty(*size, pin_memory=False, **kwargs):
        asked.append(("staging", pin_memory))
        return real_empty(*size, **kwargs)

    class Pinned(torch.Tensor):
        def to(self, device, non_blocking=False):
            asked.append(("pinned to", device, non_blocking))
            return self

    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(Pinned))
    cuda = torch.device("cuda")
    staging_buffer(3, cuda)
    staging_buffer(3, torch.device("cpu"))
    upload([1, 2], torch.int64, cuda)
    assert asked == [("staging", True), ("staging", False), ("pinned to", cuda, True)]


def test_sampling_of_all_kinds_reads_nothing():
    kinds = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.9}]
    draws = [Draw(Sampling(**{"max_tokens": 1, "seed": 7, **kind}), 0) for kind in kinds]
    logits = torch.empty(len(draws), 1000, device=DEVICE)
    with torch.inference_mode(), NoWayBack():
        tokens = sample(logits, draws, logits.argmax(dim=-1))
    assert tokens.device == DEVICE


@pytest.mark.parametrize(
    "synchronises",
    [
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: bool(tensor.any()),
        lambda tensor: torch.ones(3).to(tensor.device),
        lambda tensor: tensor.copy_(torch.ones(3)),
        lambda tensor: torch.ones(3).copy_(tensor),
    ],
)
def test_what_makes_the_host_wait_is_caught(synchronises):
    tensor = torch.empty(3, device=DEVICE)
    with NoWayBack(), pytest.raises((Synchronised, RuntimeError, NotImplementedError)):
        synchronises(tensor)


def test_copies_that_are_queued_are_not():
    with NoWayBack():
        there = torch.ones(3).to(DEVICE, non_blocking=True)
        there.copy_(torch.ones(3), non_blocking=True)
        there.copy_(there.clone())
