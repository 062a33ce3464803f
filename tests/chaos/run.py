"""Break a pool on purpose and count what its clients saw.

    python -m tests.chaos [FAULT ...] [--seconds N] [--workers N] [--engine emulated|tiny] [--list]

Without a name all faults run, except the soak. The exit code is 1 where a fault's goal is missed,
2 where a fault cannot run.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import replace

from rich.console import Console

from tests.chaos.driving import FAULTS, WHOLE_S, Fault, Result
from tests.chaos.faults import ON_REQUEST
from tests.chaos.processes import PartFailed
from tests.chaos.report import print_table
from tests.chaos.rig import Engine, Needs, Rig

TABLE_WIDTH = 200

console = Console(width=TABLE_WIDTH)


class Runner:
    """Runs faults one after the other, and keeps a rig for the next where that needs the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rig: Rig | None = None

    def run(self, fault: Fault, needs: Needs, seconds: float) -> Result:
        """Run one fault. Raises PartFailed where its rig does not start."""
        rig = self._rig_for(needs)
        try:
            result = asyncio.run(fault.run(rig, seconds))
        except BaseException:
            self.stop()
            raise
        result.compare(fault.goal)
        if result.recovery_s is None or not asyncio.run(self._reusable(rig)):
            self.stop()
        return result

    def stop(self) -> None:
        """End the rig."""
        if self._rig is not None:
            rig, self._rig = self._rig, None
            rig.stop()

    def _rig_for(self, needs: Needs) -> Rig:
        if self._rig is not None and self._rig.needs != needs:
            self.stop()
        if self._rig is None:
            console.print(f"starting {_words(needs, self._engine)}", highlight=False)
            rig = Rig(needs, self._engine)
            self._rig = rig.__enter__()
        return self._rig

    async def _reusable(self, rig: Rig) -> bool:
        if not all(gateway.alive for gateway in rig.gateways):
            return False
        timeout_s = WHOLE_S if rig.needs.serve else 5.0
        return await rig.until(rig.whole, timeout_s) is not None


def _words(needs: Needs, engine: Engine) -> str:
    kind = "Serve replicas" if needs.serve else "worker processes"
    return f"{needs.workers} {kind} ({needs.engine or engine}), {needs.gateways} gateways" + (
        f", {needs.nodes} Ray nodes" if needs.nodes > 1 else ""
    )


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; the exit code."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.faults if name not in FAULTS]
    if unknown:
        _parser().error(f"no fault {', '.join(unknown)}: see --list")
    if options.list:
        for fault in FAULTS.values():
            console.print(f"{fault.name:24} {fault.what}", highlight=False)
        return 0
    names = options.faults or [name for name in FAULTS if name not in ON_REQUEST]
    # what a shell begins in the background ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    runner, results, code = Runner(options.engine), [], 0
    try:
        for name in names:
            fault = FAULTS[name]
            needs = fault.needs
            if options.workers:
                needs = replace(needs, workers=options.workers)
            try:
                result = runner.run(fault, needs, options.seconds or fault.seconds)
            except (PartFailed, LookupError) as error:
                console.print(f"{name} cannot run: {error}", markup=False, highlight=False)
                runner.stop()
                code = 2
                continue
            results.append((fault, result))
            print_table(results[-1:], console)
    except KeyboardInterrupt:
        console.print("interrupted")
        code = 130
    finally:
        runner.stop()
    if len(results) > 1:
        print_table(results, console)
    return code or int(any(result.misses for _, result in results))


def _interrupt(number: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)  # which ends what runs on the event loop in order


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="all but the soak by default")
    parser.add_argument("--seconds", type=float, help="of load for each fault")
    parser.add_argument("--workers", type=int, help="of each rig; the fault's own by default")
    parser.add_argument("--engine", choices=("emulated", "tiny"), default="emulated")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    return parser
