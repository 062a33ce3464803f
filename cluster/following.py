"""Applies the workers' reports, asks for repairs, or refuses workers. No I/O, no clock.

`Following` is fed with the stream's entries in the order in which they are read. Where an entry
is not enough it answers with a `Need`: the caller reads that worker's card and whole set and
hands them to `settle`. Whatever is lost, repeated, late or out of order, the sink ends up with
what the workers published last:

    entry ──take──▶ next in line ─────────▶ sink.on_report
                    hole, new epoch, resync ─▶ Need ──(read)──settle──▶ sink.on_snapshot
                    old ───────────────────▶ its load, if newer, and the ids it names
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from cluster.agreement import Agreement
from cluster.blocks import HASH_BYTES
from cluster.card_check import Envelope, card_problem, version_problem, wrong_version
from cluster.protocol import PROTOCOL_VERSION, ColdReport, Load, Report, WorkerCard, WorkerState
from cluster.tracker import Tracker, Verdict

log = logging.getLogger(__name__)


class FleetSink(Protocol):
    """Who is told. Calls come in order, from the event loop's thread."""

    def on_card(self, card: WorkerCard) -> None:
        """A new worker, a new epoch of one, or a changed card."""

    def on_snapshot(self, worker: str, epoch: int, hashes: list[bytes]) -> None:
        """This is the worker's whole set now. What it has in cold tiers is told next, if any."""

    def on_cold_snapshot(
        self, worker: str, epoch: int, cpu: Sequence[bytes], disk: Sequence[bytes]
    ) -> None:
        """The whole sets of its cold tiers now."""

    def on_report(self, report: Report) -> bool | None:
        """Apply a report. False: what is known of this worker does not agree with it."""

    def on_gone(self, worker: str, reason: str) -> None:
        """The worker left, or its lease ended."""


class Held(NamedTuple):
    """What Redis holds of a worker, read in one transaction.

    epoch, sequence   of its last report
    card              its WorkerCard (JSON)
    hashes            its block set
    cpu, disk         those of its cold tiers
    """

    epoch: int
    sequence: int
    card: bytes
    hashes: list[bytes]
    cpu: Sequence[bytes] = ()
    disk: Sequence[bytes] = ()


class Need(NamedTuple):
    """Read this worker's `Held` and call `settle`.

    report   the report that showed the need; None where there was none
    repair   the worker was known, so its set is read again
    """

    worker: str
    report: Report | None
    repair: bool


class _Known:
    """A worker that the sink knows.

    heard_at      its lease counts from here
    reported_at   when its last report in line came
    newest        the last report in line that the sink got
    kept          its lease has lapsed, but it answers
    """

    def __init__(self, card: WorkerCard, now: float) -> None:
        self.card = card
        self.kept = False
        self.tracker = Tracker()
        self.agreement = Agreement()
        self.heard_at = self.reported_at = now
        self.newest: Report | None = None


class _Refused(NamedTuple):
    epoch: int
    reason: str


class Following:
    """Feeds a sink with what a pool's workers report.

    Attributes count since the start: `reports` applied, `gaps` found (holes in a sequence),
    `disagreements` (reports of another number of blocks than is known), `repairs` (whole sets
    read to correct either), `unreadable` messages.
    """

    def __init__(
        self, sink: FleetSink, *, secret: bytes, lease_s: float, heartbeat_s: float
    ) -> None:
        self.reports = 0
        self.gaps = 0
        self.disagreements = 0
        self.repairs = 0
        self.unreadable = 0
        self._sink = sink
        self._secret = secret
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._workers: dict[str, _Known] = {}
        self._refused: dict[str, _Refused] = {}

    @property
    def refused(self) -> dict[str, str]:
        """Worker -> why it is not used, in words."""
        return {worker: refused.reason for worker, refused in self._refused.items()}

    @property
    def kept(self) -> list[str]:
        """Workers whose lease has lapsed, and which answer when they are asked."""
        return [worker for worker, known in self._workers.items() if known.kept]

    @property
    def disagreeing(self) -> dict[str, int]:
        """Worker -> whole sets read in a row that did not bring its reports into agreement."""
        return {
            worker: known.agreement.unhelped
            for worker, known in self._workers.items()
            if known.agreement.broken
        }

    def report_ages_s(self, now: float) -> dict[str, float]:
        """Worker -> seconds since its last report, or since it was found without one."""
        return {name: max(0.0, now - known.reported_at) for name, known in self._workers.items()}

    @property
    def known(self) -> int:
        """Workers that the sink has."""
        return len(self._workers)

    def knows(self, worker: str) -> bool:
        """Whether the sink has this worker."""
        return worker in self._workers

    def tracker(self, worker: str) -> Tracker:
        """Where this follower stands with a worker. Raises KeyError for an unknown one."""
        return self._workers[worker].tracker

    def take(self, raw: bytes, now: float) -> Need | None:
        """The next entry of the stream (msgpack Report). `now`: seconds, monotonic."""
        try:
            report = msgspec.msgpack.decode(raw, type=Report)
        except msgspec.DecodeError as error:
            self._unreadable(raw, f"its reports cannot be read: {error}")
            return None
        worker = report.worker
        if report.version != PROTOCOL_VERSION:
            self._refuse(worker, report.epoch, wrong_version(report.version))
            return None
        if not _has_whole_hashes(report):
            self._unreadable(raw, f"its reports have hashes that are not of {HASH_BYTES} bytes")
            return None
        known = self._workers.get(worker)
        if report.state == "gone":
            self._signed_off(known, report)
            return None
        if known is None:
            refused = self._refused.get(worker)
            if refused is not None and report.epoch <= refused.epoch:
                return None
            return Need(worker, report, repair=False)
        gaps = known.tracker.gaps
        verdict = known.tracker.offer(report.epoch, report.sequence, resync=report.resync)
        self.gaps += known.tracker.gaps - gaps
        if verdict is Verdict.IGNORE:
            self._tell_of_old(known, report, now)
            return None
        known.heard_at = known.reported_at = now
        known.kept = False
        if verdict is Verdict.SNAPSHOT:
            return Need(worker, report, repair=True)
        known.newest = report
        self.reports += 1
        if self._agrees(known, report, self._sink.on_report(report), now):
            return None
        if not known.agreement.wants_read(now):
            return None
        known.agreement.asked(now)
        log.info("the index of %s does not agree with its report: reading it again", worker)
        return Need(worker, None, repair=True)

    def settle(self, need: Need, held: Held | None, now: float) -> None:
        """What Redis holds of `need.worker`; None where its lease has ended."""
        if held is not None:
            self._snapshot(need, held, now)
        known = self._workers.get(need.worker)
        report = need.report
        if known is None or report is None or known.tracker.epoch != report.epoch:
            return
        self.reports += 1
        self._tell_of_old(known, report, now)

    def renew_leases(self, now: float) -> None:
        """Redis was away: it may be empty at first, so every worker gets its lease anew."""
        for known in self._workers.values():
            known.heard_at = now

    def silent(self, now: float) -> list[str]:
        """Workers without a report for a lease: ask Redis, then call `answer_silence`."""
        return [
            worker
            for worker, known in self._workers.items()
            if now - known.heard_at >= self._lease_s
        ]

    def answer_silence(self, worker: str, *, has_lease: bool, now: float) -> None:
        """Whether Redis still has the lease of a silent worker. Without it the worker is gone."""
        known = self._workers.get(worker)
        if known is None:
            return
        if has_lease:
            known.heard_at = now - self._lease_s + self._heartbeat_s  # look again after that
        else:
            self._forget(worker, f"no report for {self._lease_s:g} s")

    def card(self, worker: str) -> WorkerCard:
        """The card of a known worker. Raises KeyError for an unknown one."""
        return self._workers[worker].card

    def reports_of(self, model: str, *, but: Collection[str]) -> bool:
        """Whether any worker of a model, those in `but` left out, has a lease."""
        return any(
            known.card.model == model and not known.kept and worker not in but
            for worker, known in self._workers.items()
        )

    def keep(self, card: WorkerCard, *, ready: bool, now: float) -> None:
        """A worker without a lease answers: it stays, and takes requests where it is ready."""
        known = self._workers.get(card.worker)
        if known is None or known.card.epoch != card.epoch:
            return
        known.kept, known.heard_at = True, now
        newest = known.newest or Report(
            worker=card.worker,
            epoch=card.epoch,
            sequence=known.tracker.sequence,
            load=Load(free_blocks=card.capacity_blocks),
        )
        state: WorkerState = "ready" if ready else "draining"
        if newest.state != state or known.newest is None:
            known.newest = msgspec.structs.replace(_without_changes(newest), state=state)
            self._sink.on_report(known.newest)

    def drop_unanswering(self, card: WorkerCard, reason: str, *, since: float) -> None:
        """A worker without a lease does not answer: it is gone, unless it has reported `since`."""
        known = self._workers.get(card.worker)
        if known is None or known.card.epoch != card.epoch or known.heard_at > since:
            return
        self._forget(card.worker, f"no report for {self._lease_s:g} s, and {reason}")

    def forgive(self, worker: str) -> None:
        """A refused worker has gone."""
        self._refused.pop(worker, None)

    def _snapshot(self, need: Need, held: Held, now: float) -> None:
        worker = need.worker
        try:
            card = msgspec.json.decode(held.card, type=WorkerCard)
        except msgspec.DecodeError as error:
            problem = version_problem(held.card) or f"its card cannot be read: {error}"
            self._refuse(worker, held.epoch, problem)
            return
        problem = card_problem(card, self._secret)
        if problem:
            self._refuse(worker, held.epoch, problem)
            return
        self._refused.pop(worker, None)
        known = self._workers.setdefault(worker, _Known(card, now))
        if not known.tracker.snapshot(card.epoch, held.sequence):
            return
        known.card = card
        known.agreement.read()
        self.repairs += need.repair
        self._sink.on_card(card)
        self._sink.on_snapshot(worker, card.epoch, held.hashes)
        if held.cpu or held.disk:
            self._sink.on_cold_snapshot(worker, card.epoch, held.cpu, held.disk)

    def _tell_of_old(self, known: _Known, report: Report, now: float) -> None:
        """A report whose blocks are known already: its load, if newer, and the ids it names.

        A snapshot may run ahead of the stream, so reports come whose blocks it includes. Only the
        one that was the last when it was taken can be compared with it.
        """
        if report.epoch != known.tracker.epoch:
            return
        newest = known.newest
        if newest is None or (newest.epoch, newest.sequence) < (report.epoch, report.sequence):
            known.newest = newest = report
        elif not report.received:
            return
        agrees = self._sink.on_report(
            msgspec.structs.replace(_without_changes(newest), received=report.received)
        )
        if newest is report and report.sequence == known.tracker.sequence:
            self._agrees(known, report, agrees, now)

    def _agrees(self, known: _Known, report: Report, answer: bool | None, now: float) -> bool:
        """Judge by the sink's answer to the report that is level with what it knows."""
        agrees, agreement = answer is not False, known.agreement
        was_broken = agreement.broken
        agreement.judge(agrees, now)
        self.disagreements += not agrees
        if agreement.broken != was_broken:
            if agreement.broken:
                log.error("%s publishes other blocks than it says that it caches", report.worker)
            else:
                log.warning("%s publishes what it caches again", report.worker)
        return agrees

    def _signed_off(self, known: _Known | None, report: Report) -> None:
        if known is not None and report.epoch >= known.tracker.epoch:
            self._forget(report.worker, "it has left")
        refused = self._refused.get(report.worker)
        if refused is not None and report.epoch >= refused.epoch:
            del self._refused[report.worker]

    def _unreadable(self, raw: bytes, reason: str) -> None:
        self.unreadable += 1
        try:
            envelope = msgspec.msgpack.decode(raw, type=Envelope)
        except msgspec.DecodeError:
            log.warning("an entry of the stream cannot be read, nor from whom it is: %s", reason)
            return
        if envelope.version != PROTOCOL_VERSION:
            reason = wrong_version(envelope.version)
        self._refuse(envelope.worker, envelope.epoch, reason)

    def _refuse(self, worker: str, epoch: int, reason: str) -> None:
        known = self._workers.get(worker)
        if known is not None and epoch < known.tracker.epoch:
            return  # a former life under this name
        before = self._refused.get(worker)
        if before is not None and epoch < before.epoch:
            return
        if before is None or before.reason != reason:
            log.warning("worker %s is refused: %s", worker, reason)
        self._refused[worker] = _Refused(epoch, reason)
        if known is not None:
            self._forget(worker, reason)

    def _forget(self, worker: str, reason: str) -> None:
        del self._workers[worker]
        self._sink.on_gone(worker, reason)


def _has_whole_hashes(report: Report) -> bool:
    joined = [report.stored, report.evicted]
    if isinstance(cold := report.cold, ColdReport):
        joined += [cold.cpu_stored, cold.cpu_evicted, cold.disk_stored, cold.disk_evicted]
    return not any(len(hashes) % HASH_BYTES for hashes in joined)


def _without_changes(report: Report) -> Report:
    """The same load and state, of blocks that are known already."""
    cold = report.cold
    return msgspec.structs.replace(
        report,
        stored=b"",
        evicted=b"",
        received=[],
        cold=cold.without_changes() if isinstance(cold, ColdReport) else cold,
    )
