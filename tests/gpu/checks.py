"""What has to hold on a GPU. Each check returns what it saw and raises AssertionError otherwise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from tests.gpu.varlen import DTYPES, PAGE_MULTIPLE, VarlenBackend
from tests.worker.paged import Heads, Paged
from tests.worker.tiny_models import item
from worker.attention.base import AttentionBackend, KvPool, Rows
from worker.attention.registry import attention_backend
from worker.batch import BatchItem
from worker.decode_graphs import Capture, Decoded
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.messages import EngineRequest
from worker.models import LlamaModel
from worker.runner import TorchRunner

BLOCK = 16
BATCH = 8

RAGGED = [(40, 1), (33, 1), (16, 1), (2, 1), (1, 1), (130, 3), (20, 2), (37, 21), (48, 48), (5, 5)]
LONG = [(8000, 1), (2050, 1), (700, 1), (3, 1), (4100, 1000)]
Shape = tuple[list[tuple[int, int]], int, Heads]
"""(context, rows of this step) of each sequence, block size, heads."""

SHAPES: list[Shape] = [
    (RAGGED, 16, Heads(6, 2, 64)),
    (RAGGED, 32, Heads(8, 8, 128)),
    (RAGGED, 256, Heads(32, 8, 128)),
    (RAGGED, 64, Heads(8, 1, 80)),
    (RAGGED, 16, Heads(9, 3, 64)),
    (LONG, 16, Heads(32, 8, 128)),
]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attention_error(
    backend: AttentionBackend,
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Greatest difference to the fp32 sdpa reference on the same values."""
    paged = Paged(lengths, block_size, heads, dtype)
    step = paged.metadata(device)
    count = sum(rows for _, rows in lengths)
    new = [
        torch.cat([part[-rows:] for part, (_, rows) in zip(parts, lengths, strict=True)])
        for parts in (paged.keys, paged.values)
    ]
    inputs = [paged.random(count, heads.query, heads.dim), *new, *paged.pool]
    answers = []
    for used, kind in ((backend, dtype), (attention_backend("sdpa"), torch.float32)):
        *rows, keys, values = [tensor.to(device, kind, copy=True) for tensor in inputs]
        answers.append(
            used.attend(Rows(*rows), KvPool(keys, values), used.plan(step, kind)).float()
        )
    return float((answers[0] - answers[1]).abs().max())


def check_attention(
    backend: AttentionBackend,
    device: torch.device,
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
) -> str:
    """The backend against the fp32 reference, all shapes in all dtypes."""
    worst = []
    for dtype in dtypes:
        errors = [attention_error(backend, *shape, dtype, device) for shape in shapes]
        for shape, error in zip(shapes, errors, strict=True):
            assert error <= TOLERANCES[dtype], f"{dtype}, {shape}: off by {error:.2e}"
        worst.append(f"{dtype} {max(errors):.1e}")
    return f"{len(shapes)} shapes; greatest difference: {', '.join(worst)}"


def check_varlen(device: torch.device) -> str:
    """torch's own paged kernels against the same reference, where they can read the blocks.

    That triton and they agree with it says that the reference is right.
    """
    shapes = [(lengths, PAGE_MULTIPLE, heads) for lengths, _, heads in SHAPES]
    return check_attention(VarlenBackend(), device, shapes, DTYPES)


def new_runner(model: LlamaModel, blocks: int, capture: Capture | None) -> TorchRunner:
    """A runner that replays its decodes where `capture` is given."""
    runner = TorchRunner(model, blocks, BLOCK)
    if capture:
        runner.capture_decodes(BATCH, model.config.context_tokens, capture)
    return runner


def answers_of(
    runner: TorchRunner | Twice, blocks: int, caching: bool
) -> tuple[list[list[int]], int]:
    """Greedy answers to requests that come one after another, and how many tokens were reused."""
    vocabulary = runner.model.config.vocab_size
    config = EngineConfig(
        block_size=BLOCK,
        capacity_blocks=blocks,
        context_tokens=runner.model.config.context_tokens,
        max_batch_size=BATCH,
        token_budget=256,
        prefix_caching=caching,
    )
    core = EngineCore(config, runner)
    rng = random.Random(1)
    stem = [rng.randrange(vocabulary) for _ in range(200)]
    answers: dict[str, list[int]] = {}

    def step() -> None:
        for output in core.step():
            assert not output.error, output.error
            answers[output.request_id] += output.token_ids

    for index in range(2 * BATCH):
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 90))]
        name = str(index)
        answers[name] = []
        sampling = Sampling(max_tokens=rng.randint(4, 40), temperature=0.0, ignore_eos=True)
        prompt = pack_tokens(stem[: rng.choice([0, 100, 200])] + own)
        core.add(
            EngineRequest(
                request_id=name, token_ids=prompt, namespace_root=bytes(32), sampling=sampling
            )
        )
        for _ in range(4):
            step()
    while core.has_work():
        step()
    return list(answers.values()), core.stats().reused_tokens


class Compared(NamedTuple):
    """Rows of logits beside those of a reference.

    error      greatest difference, in units of the row's greatest logit
    rows       rows compared
    near_ties  rows whose two greatest logits are too near to demand the same token
    """

    error: float
    rows: int
    near_ties: int


def compare_rows(ours: Decoded, reference: Decoded, tolerance: float) -> Compared:
    """Logits within `tolerance` of the row's greatest one; the same token wherever that decides.

    Two rows within the tolerance may order two logits differently that are less than twice as far
    apart. Raises AssertionError otherwise.
    """
    scale = reference.logits.abs().amax(dim=-1)
    errors = (ours.logits - reference.logits).abs().amax(dim=-1) / scale
    error = float(errors.max())
    assert error <= tolerance, f"logits differ by {error:.1e} of the greatest, over {tolerance:g}"
    top = reference.logits.topk(2, dim=-1).values
    decided = (top[:, 0] - top[:, 1]) / scale > 2 * tolerance
    other = decided & (ours.tokens != reference.tokens)
    assert not other.any(), (
        f"{int(other.sum())} of {len(other)} tokens are others than the reference's, which are "
        f"ahead by more than {2 * tolerance:g} of the greatest logit"
    )
    return Compared(error, len(decided), int((~decided).sum()))


class Twice:
    """A runner that computes every step also by another runner, and compares.

    Both get the tokens that the first has sampled, so that a near tie that turns does not lead
    them apart.
    """

    def __init__(self, ours: TorchRunner, reference: TorchRunner, tolerance: float) -> None:
        self.model = ours.model
        self.compared: list[Compared] = []
        self._ours = ours
        self._reference = reference
        self._tolerance = tolerance

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """See `worker.batch.Runner`; greedy only."""
        answers: list[int | None] = [None] * len(batch)
        sampled, ours = self._ours.compute(batch)
        again, reference = self._reference.compute(batch)
        assert sampled == again
        if sampled:
            self.compared.append(compare_rows(ours, reference, self._tolerance))
            for index, token in zip(sampled, ours.tokens.tolist(), strict=True):
                answers[index] = token
        return answers


def check_graphs(model: LlamaModel, capture: Capture, reference: Capture) -> str:
    """Replayed graphs against the same launches made one by one: see `compare_rows`."""
    blocks = 2 * BATCH * 24
    runners = [new_runner(model, blocks, one) for one in (capture, reference)]
    runner = Twice(runners[0], runners[1], TOLERANCES[model.dtype])
    answers_of(runner, blocks, True)
    error = max(one.error for one in runner.compared)
    rows, near = (sum(column) for column in list(zip(*runner.compared, strict=True))[1:])
    return (
        f"{rows} rows of logits, greatest difference {error:.1e} of the greatest logit; tokens "
        f"equal but for {near} near ties, where they were not compared"
    )


def check_cache(model: LlamaModel, capture: Capture | None) -> str:
    """Greedy answers with the prefix cache against those without; wants a model in fp32."""
    blocks = 2 * BATCH * 24
    cached, reused = answers_of(new_runner(model, blocks, capture), blocks, True)
    uncached, _ = answers_of(new_runner(model, blocks, capture), blocks, False)
    assert reused > 0, "nothing was reused, so nothing was compared"
    assert cached == uncached, "the prefix cache changed an answer"
    return f"{sum(map(len, cached))} tokens equal, {reused} prompt tokens reused"


def kinds_of_steps() -> Iterator[list]:
    """Steps of chunks and decodes together, of decodes, and of random draws."""
    chunk = item(list(range(1, 40)), 0, [1, 2, 3])
    decodes = [item([5], 10, [4]), item([6], 30, [5, 6]), item([7], 0, [7])]
    random_draws = Sampling(max_tokens=9, temperature=1.0, top_p=0.9, top_k=20, seed=3)
    yield [*decodes, chunk]
    yield decodes
    yield [replace(entry, sampling=random_draws) for entry in decodes]


@contextmanager
def synchronising_refused() -> Iterator[None]:
    """torch raises where an operation would make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_sync(model: LlamaModel, capture: Capture) -> str:
    """No operation of a step waits for the device; reading the tokens waits for an event."""
    runner = new_runner(model, 32, capture)
    for batch in kinds_of_steps():
        runner.execute(batch)  # compiles kernels and takes memory, which may wait
    with synchronising_refused():
        for batch in kinds_of_steps():
            runner.execute(batch)
    return "mixed, decode and sampled steps ran without a wait"


def check_no_allocation(model: LlamaModel, capture: Capture) -> str:
    """Decoding takes no memory from the device once it is under way."""
    runner = new_runner(model, 32, capture)
    table = list(range(1, 17))

    def decode(position: int) -> None:
        runner.execute([item([1 + position], position, table)])

    for position in range(8):
        decode(position)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for position in range(8, 200):
        decode(position)
    taken = torch.cuda.memory_stats()["num_device_alloc"] - before
    assert not taken, f"{taken} allocations from the device in 192 decode steps"
    return "none from the device in 192 decode steps"
