"""Client of the gateway's admin API: policy, caches, fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec

from loadgen.answer import error_message

POLL_S = 0.1
ADMIN_TIMEOUT_S = 60.0


class AdminError(RuntimeError):
    """The gateway could not be controlled. Its text says what was asked and what to change."""


class Refused(AdminError):
    """The gateway refused the call. `reason` is the gateway's own text."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class PolicyView(msgspec.Struct, frozen=True):
    """Answer of `GET /admin/policy`."""

    policy: str
    available: list[str] = msgspec.field(default_factory=list)


class BusView(msgspec.Struct, frozen=True):
    """State of the gateway's connection to Redis."""

    connected: bool = True
    stale: bool = False
    reason: str = ""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the gateway sees it; blocks in blocks, load as `cluster.protocol.Load`."""

    worker: str
    epoch: int = 0
    state: str = ""
    device: str = ""
    block_size: int = 0
    capacity_blocks: int = 0
    cached_blocks: int = 0
    indexed_blocks: int = 0
    pending_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def idle(self) -> bool:
        """Whether no request runs, waits or is in transit."""
        return self.running + self.waiting + self.pending_prefill_tokens == 0


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /admin/fleet`.

    requests_total   requests routed since the gateway's start
    in_flight        requests routed and not ended
    """

    requests_total: int
    in_flight: int
    bus: BusView = BusView()
    workers: list[WorkerView] = msgspec.field(default_factory=list)

    @property
    def quiet(self) -> bool:
        """Whether no request is in flight and every worker is idle."""
        return self.in_flight == 0 and all(worker.idle for worker in self.workers)

    @property
    def blocks(self) -> int:
        """Blocks cached by any worker or indexed by the gateway."""
        return sum(max(worker.indexed_blocks, worker.cached_blocks) for worker in self.workers)


class ExplainedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a decision, in prompt tokens. `cost` is None where `left_out` gives the reason."""

    worker: str
    hit_tokens: int = 0
    coming_tokens: int = 0
    new_tokens: int = 0
    pending_tokens: int = 0
    batch: int = 0
    cost: float | None = None
    chosen: bool = False
    left_out: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a decision; `others` are workers beyond those in it."""

    policy: str = ""
    prompt_tokens: int = 0
    chosen: str = ""
    because: str = ""
    workers: list[ExplainedWorker] = msgspec.field(default_factory=list)
    others: int = 0


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _PolicyChange(msgspec.Struct, frozen=True):
    policy: str


T = TypeVar("T")


class Admin:
    """Admin client of one gateway; an async context manager.

    Every method raises AdminError where the gateway cannot be reached or refuses.
    """

    def __init__(self, url: str, admin_key: str = "", api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._api = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env off: proxies of the environment must not apply to the gateway.
        self._http = httpx.AsyncClient(timeout=ADMIN_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The name of the first model served."""
        models = await self._ask("GET", "/v1/models", _Models, headers=self._api)
        if not models.data:
            raise AdminError(f"{self._url} serves no model yet: wait until /ready answers 200")
        return models.data[0].id

    async def policy(self) -> PolicyView:
        """The current policy and the available ones."""
        return await self._ask("GET", "/admin/policy", PolicyView, headers=self._admin)

    async def set_policy(self, policy: str) -> str:
        """Change the policy; returns its name as the gateway reports it."""
        content = msgspec.json.encode(_PolicyChange(policy))
        await self._ask("POST", "/admin/policy", msgspec.Raw, headers=self._admin, content=content)
        return (await self.policy()).policy

    async def flush(self) -> None:
        """Drop every worker's cache."""
        await self._ask("POST", "/admin/flush", msgspec.Raw, headers=self._admin)

    async def fleet(self) -> FleetView:
        """The gateway's picture of its workers."""
        return await self._ask("GET", "/admin/fleet", FleetView, headers=self._admin)

    async def decision(self, request_id: str) -> Explanation:
        """The stored routing decision of a recent request that was sent with the explain header."""
        path = f"/admin/decisions/{request_id}"
        return await self._ask("GET", path, Explanation, headers=self._admin)

    async def wait_for(
        self, condition: Callable[[FleetView], bool], timeout_s: float
    ) -> FleetView | None:
        """Poll the fleet until the condition holds; None where it does not within `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition(fleet := await self.fleet()):
            if loop.time() >= deadline:
                return None
            await asyncio.sleep(POLL_S)
        return fleet

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        headers: dict[str, str],
        content: bytes | None = None,
    ) -> T:
        try:
            answer = await self._http.request(
                method, self._url + path, headers=headers, content=content
            )
        except httpx.HTTPError as error:
            raise AdminError(
                f"no answer from {self._url}{path} ({str(error) or type(error).__name__}): "
                "is the gateway running there?"
            ) from error
        if answer.status_code in (401, 403):
            flag = "--admin-key" if path.startswith("/admin") else "--api-key"
            raise AdminError(
                f"{self._url}{path} refused the key (HTTP {answer.status_code}): set {flag}"
            )
        if answer.status_code != 200:
            raise Refused(
                f"{method} {self._url}{path} answered {answer.status_code}: {answer.text[:300]}",
                error_message(answer.content) or answer.text[:300],
            )
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise AdminError(
                f"{self._url}{path} did not answer as a gateway does: {error}"
            ) from error
