"""The engine: add requests, step, take outputs. Pure: the runner does the computing.

A step schedules, runs the batch and commits. Other requests see nothing that the forward pass
writes before the commit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import cast

from cluster.blocks import hash_block as sha256_block
from cluster.protocol import Load, RequestError, Sampling
from worker.batch import NOT_FINITE, BatchItem, Runner, check_sampled
from worker.block_pool import BlockPool, InvariantError
from worker.engine_config import EngineConfig
from worker.eviction.base import EvictionPolicy
from worker.eviction.lru import Lru
from worker.isolation import isolate
from worker.messages import Changes, EngineRequest, EngineStats, EvictionAges, Output, TierStats
from worker.plan import Plan, batch_of
from worker.prefill_speed import StepWork
from worker.prefix_cache import AGE_BOUNDS_S, PrefixCache, Why
from worker.request_check import sequence_of
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.tiers.cold_tiers import ColdTiers
from worker.tiers.saving import save_cache

NOT_FINITE_REASON = (
    "the model computed NaN or infinity for this request, even without cached blocks: check its "
    "weights, and whether worker.dtype has the range that they need"
)

STARVED_STEPS_TO_FAIL = 5
"""A request fails after this many steps without a token in which it did not fit in memory, because
each of them is computed in parts."""

NO_TOKEN = Sampling(max_tokens=1, temperature=0.0)


class EngineCore:
    """One engine. Not thread-safe: call one method at a time.

    last_failure   the exception of the last step in which the runner failed
    dead_steps     steps in a row in which not even a single token could be computed
    last_work      what the last step computed
    tiers          the cold tiers of its cache, or None
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        hash_block: Callable[[bytes, bytes], bytes] = sha256_block,
        make_policy: Callable[[BlockPool], EvictionPolicy] = Lru,
        tiers: ColdTiers | None = None,
    ) -> None:
        self.config = config
        self.tiers = tiers
        self._runner = runner
        self._pool = BlockPool(config.capacity_blocks)
        self._cache = PrefixCache(
            self._pool, make_policy(self._pool), config.block_size, config.keep_limit, tiers
        )
        self._scheduler = Scheduler(config, self._pool, self._cache, hash_block, tiers)
        self._end_tokens = frozenset(config.eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._received: list[str] = []
        self._arrivals = 0
        self._steps = 0
        self._failed_steps = 0
        self._generated_tokens = 0
        self.last_failure: Exception | None = None
        self.dead_steps = 0
        self.last_work = StepWork(0, 0, 0, synced=True)

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises RequestError: 400 if it can never run (empty, too long for the context or the pool,
        an id in use), 429 if `max_waiting` requests are waiting already.
        """
        config = self.config
        if request.request_id in self._sequences:
            raise RequestError(
                f"the request id {request.request_id!r} is in use; send another",
                param="request_id",
                code="duplicate_request_id",
            )
        sequence = sequence_of(request, self._arrivals + 1, config)
        if len(self._scheduler.waiting) >= config.max_waiting:
            raise RequestError(
                f"{config.max_waiting} requests are waiting already; try again later or on "
                "another worker",
                status=429,
                type="rate_limit_error",
                code="queue_full",
            )
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._received.append(request.request_id)
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request, without an output. Returns whether it existed."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._scheduler.end(sequence)
        return True

    @property
    def runner(self) -> Runner:
        """The runner, which computes the batches."""
        return self._runner

    def fail_all(self, reason: str) -> list[Output]:
        """End every running or waiting request with an "error" output that gives the reason."""
        return self._fail(list(self._sequences.values()), reason)

    def save(
        self, seconds: float, clock: Callable[[], float], idle: Callable[[], None]
    ) -> tuple[int, int]:
        """Write the blocks cached on the device to disk (`tiers.saving`), after the last request.

        The engine must not be used afterwards. Returns how many blocks are on disk, and of how
        many. Raises InvariantError while requests run, because they still write to blocks.
        """
        if self._sequences:
            raise InvariantError(f"{len(self._sequences)} requests still use the cache")
        self._scheduler.pins.release()
        if self.tiers is None:
            return 0, len(self._cache)
        return save_cache(self._cache, self.tiers, seconds, clock, idle)

    def forget_model(self, eos_token_ids: list[int]) -> None:
        """Prepare for new weights: nothing cached may be used again.

        Raises InvariantError while requests run, because their KV would be mixed.
        """
        if self._sequences:
            raise InvariantError(f"{len(self._sequences)} requests still use the old weights")
        self._scheduler.flush()
        if self.tiers is not None:
            self.tiers.forget(files=False)  # files name their weights
        self._end_tokens = frozenset(eos_token_ids)

    def flush(self) -> None:
        """Drop all cached blocks at once, including the cold tiers. Running requests continue, but
        cache nothing more."""
        self._scheduler.flush()
        if self.tiers is not None:
            self.tiers.forget(files=True)

    def expire(self, now: float) -> None:
        """Let cached blocks expire. `step` does this too; call it while there is no work."""
        self._scheduler.expire(now)

    def pin(self, namespace_root: bytes, token_ids: bytes) -> int:
        """Protect the cached blocks of a prompt (`pack_tokens`) from eviction until a flush.

        Returns how many of its leading tokens are pinned; `pin_share` limits them.
        """
        return self._scheduler.pins.pin(namespace_root, token_ids)

    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._sequences)

    def waits_for_loads(self) -> bool:
        """Whether all work waits for blocks from a cold tier."""
        scheduler = self._scheduler
        return bool(
            scheduler.loading is not None
            and self._sequences
            and not scheduler.running
            and scheduler.loading.tiers.loads
        )

    def step(self, now: float = 0.0) -> list[Output]:
        """Compute one batch. `now` is the caller's clock in seconds, for eviction policies.

        If the runner fails, the batch is computed again in halves: a request that fails alone ends
        with an "error" output, one that runs out of memory is preempted (and fails if that keeps
        happening), and the others continue.
        A request whose logits are not finite is computed once more without cached blocks, and ends
        with an "error" output if that fails too. Raises InvariantError if there is work but none
        can be scheduled.
        """
        plan = self._scheduler.schedule(now)
        batch, work = batch_of(plan)
        if not batch:
            if self._sequences and not self.waits_for_loads():
                load = self.load()
                raise InvariantError(f"nothing can be scheduled: {load}, {self.config}")
            return []
        self.last_work = work
        self._steps += 1
        failed: list[Output] = []
        try:
            sampled = self._runner.execute(batch)
            check_sampled(batch, sampled, work.decodes)
            self.dead_steps = 0
        except Exception as error:
            self.last_failure = error
            self._failed_steps += 1
            failed, sampled = self._isolate(plan, batch)
        if NOT_FINITE in sampled:
            failed, sampled = self._compute_afresh(plan, sampled, failed)
        return failed + self._commit(plan, sampled)

    def decoding(self) -> list[tuple[str, int]]:
        """Each decoding request and its number of computed tokens, in batch order."""
        return [(item.request_id, item.start) for item in self._scheduler.decodes.items]

    def steady_steps(self) -> int:
        """Number of coming steps that only lengthen answers, unless a request is added or cancelled
        or an end token is sampled before."""
        return self._scheduler.steady_steps()

    def advance(self, steps: int, sampled: Iterable[array[int]], now: float = 0.0) -> None:
        """Take 1 to `steady_steps()` steps at once, without the runner.

        Equivalent to as many calls of `step`, the last one at `now`, with a runner that samples
        `sampled`: `steps` tokens for each of `decoding()`, none of them an end token. For virtual
        time, in which most steps are steady. (Exception: blocks that a policy lets expire do so at
        `now`, not in between.)
        """
        self._scheduler.advance(steps, sampled, now)
        decodes = len(self._scheduler.decodes)
        self.last_work = StepWork(0, 0, decodes, synced=True)
        self._steps += steps
        self._generated_tokens += steps * decodes

    def load(self) -> Load:
        """The current load, in O(1)."""
        return Load(
            pending_prefill_tokens=self._scheduler.pending.tokens,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_blocks=self._pool.free_blocks,
            cached_blocks=len(self._cache),
            pending_prefill_pairs=self._scheduler.pending.pairs,
            waiting_by_priority=self._scheduler.waiting_by_priority,
            start_interval_s=self._scheduler.start_rate.interval_s(self._cache.now),
        )

    def take_changes(self) -> Changes:
        """The changes since the last call. All of them applied give `cached_blocks()`."""
        stored, evicted = self._cache.take_changes()
        received, self._received = self._received, []
        cold = None if self.tiers is None else self.tiers.report()
        return Changes(stored=stored, evicted=evicted, received=received, cold=cold)

    def cached_blocks(self) -> list[bytes]:
        """Hashes of all cached blocks, parents first."""
        return self._cache.hashes()

    def stats(self) -> EngineStats:
        """Counts since the engine started."""
        scheduler, cache = self._scheduler, self._cache
        return EngineStats(
            hits=scheduler.hits,
            partial_hits=scheduler.partial_hits,
            misses=scheduler.misses,
            reused_tokens=scheduler.reused_tokens,
            resumed_tokens=scheduler.resumed_tokens,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            generated_tokens=self._generated_tokens,
            evictions=cache.evictions,
            evictions_for_space=cache.evicted_for[Why.SPACE],
            evictions_over_share=cache.evicted_for[Why.CAP],
            evictions_expired=cache.evicted_for[Why.EXPIRED],
            flushed_blocks=cache.flushed,
            pinned_blocks=len(scheduler.pins.blocks),
            duplicates=cache.duplicates,
            preemptions=scheduler.preemptions,
            held_requests=scheduler.held_requests,
            collisions=cache.collisions,
            steps=self._steps,
            failed_steps=self._failed_steps,
        )

    def tier_stats(self) -> TierStats | None:
        """Counts of the cold tiers, or None."""
        return None if self.tiers is None else self.tiers.stats()

    def eviction_ages(self) -> EvictionAges:
        """Time from last use to eviction of evicted blocks."""
        cache = self._cache
        return EvictionAges(
            bounds_s=list(AGE_BOUNDS_S),
            counts=list(cache.evicted_ages),
            sum_s=cache.evicted_age_s,
        )

    def check(self) -> None:
        """Raises InvariantError with figures if the bookkeeping is inconsistent. O(pool)."""
        self._scheduler.check()
        live = self._scheduler.running.keys() | self._scheduler.waiting.keys()
        if live != self._sequences.keys():
            raise InvariantError(f"requests {sorted(live ^ self._sequences.keys())} are lost")

    def _isolate(self, plan: Plan, batch: list[BatchItem]) -> tuple[list[Output], list[int | None]]:
        """Recompute a failed batch. Returns the outputs of the requests that fail, which leave the
        plan, and the tokens sampled for the others."""
        sequences = plan.sequences()
        found = isolate(self._runner, batch)
        failed: dict[int, Exception] = found.failed | {
            index: error
            for index, error in found.starved.items()
            if sequences[index].starve() >= STARVED_STEPS_TO_FAIL
        }
        if not found.computed and not failed:  # or the same batch would be retried
            index = min(found.starved)
            failed[index] = found.starved[index]
        outputs = []
        for index, error in failed.items():
            reason = f"the engine failed on this request: {error!r}"
            outputs += self._fail([sequences[index]], reason)
        for index in sorted(found.starved.keys() - failed.keys(), reverse=True):
            self._scheduler.preempt(sequences[index])
        alive = found.computed or self._computes()
        self.dead_steps = 0 if alive else self.dead_steps + 1
        return outputs, plan.without({*found.failed, *found.starved}, sequences, found.sampled)

    def _computes(self) -> bool:
        """Whether the runner can compute a token at all; if so, the requests caused the failure."""
        block = self._pool.allocate()  # each failed or preempted sequence has left one vacant
        try:
            self._runner.execute([BatchItem("", [0], 0, [block], True, NO_TOKEN, 0)])
        except Exception:
            return False
        finally:
            self._pool.release(block, keep=False)
        return True

    def _compute_afresh(
        self, plan: Plan, sampled: list[int | None], failed: list[Output]
    ) -> tuple[list[Output], list[int | None]]:
        """Remove requests whose logits are not finite from the plan. The blocks that they reused
        may be the cause, and those that they computed must not be reused: both leave the cache."""
        sequences = plan.sequences()
        suspects = [index for index, token in enumerate(sampled) if token == NOT_FINITE]
        for index in reversed(suspects):  # the first of them becomes the first in the queue
            sequence = sequences[index]
            self._scheduler.distrust(sequence.block_table)
            if sequence.isolated:
                failed = failed + self._fail([sequence], NOT_FINITE_REASON)
            else:
                self._scheduler.restart(sequence)
        return failed, plan.without({*suspects}, sequences, sampled)

    def _commit(self, plan: Plan, sampled: list[int | None]) -> list[Output]:
        outputs = self._commit_decodes(cast(list[int], sampled[: len(plan.decodes)]))
        prefilled = sampled[len(outputs) :]
        for (sequence, count), token in zip(plan.prefills.items(), prefilled, strict=True):
            self._scheduler.commit_prefill(sequence, count, token)
            if token is None:
                continue
            output = Output(sequence.request_id, [token], hit_tokens=sequence.hit_tokens or 0)
            outputs.append(output)
            if token in self._end_tokens and not sequence.sampling.ignore_eos:
                output.finish_reason = "stop"
            elif len(sequence.tokens) >= sequence.limit_tokens:
                output.finish_reason = "length"
            if output.finish_reason:
                self._end(sequence)
            else:
                self._scheduler.decodes.join(sequence)
        self._generated_tokens += len(outputs)
        return outputs

    def _commit_decodes(self, tokens: list[int]) -> list[Output]:
        decodes, end_tokens = self._scheduler.decodes, self._end_tokens
        one_each = [[token] for token in tokens]
        outputs = list(map(Output, decodes.request_ids, one_each, repeat(""), decodes.hit_tokens))
        ended = {}
        for sequence in self._scheduler.commit_decodes(one_each):
            ended[decodes.sequences.index(sequence)] = "length"
        if not end_tokens.isdisjoint(tokens):
            for index, token in enumerate(tokens):
                if token in end_tokens and not decodes.sequences[index].sampling.ignore_eos:
                    ended[index] = "stop"
        for index, reason in sorted(ended.items(), reverse=True):
            outputs[index].finish_reason = reason
            self._end(decodes.sequences[index])
        return outputs

    def _fail(self, sequences: Iterable[Sequence], reason: str) -> list[Output]:
        outputs = []
        for sequence in sequences:
            self._end(sequence)
            outputs.append(
                Output(
                    request_id=sequence.request_id,
                    token_ids=[],
                    finish_reason="error",
                    hit_tokens=sequence.hit_tokens or 0,
                    error=reason,
                )
            )
        return outputs

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self._scheduler.end(sequence)
