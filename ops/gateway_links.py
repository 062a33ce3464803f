"""The gateway, its index, and a probe through it, as `stemroute doctor` sees them."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import httpx

from cluster.protocol import HEADER_HIT_TOKENS, HEADER_WORKER
from cluster.settings import GatewaySettings
from ops.bus_links import BusLinks
from ops.links import Broken, Skip, Step, settled
from ops.status import encoder_line


class GatewayLinks:
    """One gateway, compared with what the bus and the workers say.

    client   an HTTP client whose base URL is the gateway's
    """

    def __init__(
        self,
        settings: GatewaySettings,
        client: httpx.AsyncClient,
        bus: BusLinks,
        patience_s: float,
    ) -> None:
        self._settings = settings
        self._client = client
        self._bus = bus
        self._patience_s = patience_s
        self._answers = False

    def steps(self) -> list[Step]:
        """The links in order; each builds on those before it."""
        return [
            Step("gateway", self._gateway_link),
            Step("ready", self._ready_link),
            Step("index", self._index_link),
            Step("probe", self._probe_link),
            Step("encoder", self._encoder_link),
        ]

    async def _gateway_link(self) -> str:
        try:
            answer = await self._client.get("/health")
        except httpx.HTTPError as error:
            raise Broken(
                f"no gateway answers at {self._client.base_url} ({error!r})",
                "start it (stemroute gateway), or name it with --url",
            ) from error
        if answer.status_code != 200 or '"status":"ok"' not in answer.text.replace(" ", ""):
            raise Broken(
                f"the server at {self._client.base_url} is not a gateway "
                f"(status {answer.status_code})",
                "name the gateway with --url",
            )
        self._answers = True
        return f"answers at {self._client.base_url}"

    async def _ready_link(self) -> str:
        self._need_gateway()
        view = (await self._ask("GET", "/ready", None, key="")).json()
        if not view["ready"]:
            raise Broken("; ".join(view["reasons"]), "fix the links above, or what it names")
        if view["refused"]:
            refused = [f"{worker}: {why}" for worker, why in view["refused"].items()]
            raise Broken(f"it refuses {'; '.join(refused)}", "upgrade or restart these workers")
        if view["degraded"]:
            raise Broken(
                "it serves, but " + "; ".join(view["degraded"]),
                "fix the links above, or what it names",
            )
        return f"{view['workers_ready']} workers ready for {', '.join(view['models'])}"

    async def _index_link(self) -> str:
        self._need_gateway()
        apart = await settled(self._disagreeing, self._patience_s)
        if apart:
            raise Broken(
                "; ".join(f"{worker}: {why}" for worker, why in apart.items()),
                f"restart {', '.join(apart)} with the gateway's version of stemroute: they count "
                "cached blocks that their reports do not contain",
            )
        if not self._bus.usable:
            raise Skip("no worker to compare with")
        problem = await settled(self._index_problem, self._patience_s)
        if problem:
            raise Broken(
                problem,
                "if it stays: let the gateway use the same Redis and pool, or restart it",
            )
        return "it knows every worker in its present epoch, and all blocks that they cache"

    async def _disagreeing(self) -> dict[str, str]:
        fleet = (await self._ask("GET", "/admin/fleet", None)).json()
        apart: dict[str, str] = fleet["disagreeing"]
        return apart

    async def _index_problem(self) -> str:
        fleet = (await self._ask("GET", "/admin/fleet", None)).json()
        seen = {row["worker"]: row for row in fleet["workers"]}
        for card in self._bus.usable:
            row = seen.get(card.worker)
            if row is None:
                return f"the gateway (pool {fleet['pool']!r}) does not know {card.worker}"
            listing = await self._bus.listing(card)
            if row["epoch"] != listing.epoch:
                return (
                    f"the gateway knows {card.worker} in epoch {row['epoch']}, "
                    f"but it is in {listing.epoch}"
                )
            cached = len(listing.blocks) // 16
            known = row["indexed_blocks"] + row["dropped_blocks"]
            if known != cached:
                return (
                    f"the gateway has {known} blocks of {card.worker} in its "
                    f"index, but it caches {cached}"
                )
        return ""

    async def _probe_link(self) -> str:
        self._need_gateway()
        fleet = (await self._ask("GET", "/admin/fleet", None)).json()
        usable = [row for row in fleet["workers"] if row["state"] == "ready"]
        if not usable:
            raise Skip("no worker is ready")
        told = []
        for model in sorted({row["model"] for row in usable}):
            rows = [row for row in usable if row["model"] == model]
            told.append(await self._probe(model, rows[0]["block_size"], len(rows)))
        return "; ".join(told)

    async def _probe(self, model: str, block_size: int, workers: int) -> str:
        """A new prompt, then the same again until a worker sees it for the second time."""
        text = " ".join(secrets.token_hex(2) for _ in range(3 * block_size))
        body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
        visited: set[str] = set()
        for _ in range(2 * workers + 1):
            answer = await self._ask("POST", "/v1/completions", body, key=self._settings.api_key)
            worker = answer.headers[HEADER_WORKER]
            if worker in visited:
                hit = int(answer.headers[HEADER_HIT_TOKENS])
                if not hit:
                    raise Broken(
                        f"{worker} computed the same prompt twice and reused nothing of it",
                        "its pool may be too small for a prompt (worker.kv_blocks)",
                    )
                return f"{model}: {hit} tokens reused by {worker} on the second request"
            visited.add(worker)
            if not await settled(partial(self._unknown_at, worker, body), self._patience_s):
                continue
            raise Broken(
                f"{worker} computed the probe, but the gateway does not expect a hit there",
                "its reports do not reach the gateway: see /ready and the gateway's log",
            )
        raise Broken(
            f"{2 * workers + 1} equal requests to {model} never met the same worker twice",
            "workers come and go: run doctor again when they are stable",
        )

    async def _encoder_link(self) -> str:
        """After the probe, for which the gateway has fetched the tokenizers."""
        self._need_gateway()
        encoders = (await self._ask("GET", "/admin/fleet", None)).json()["encoders"]
        if not encoders:
            raise Skip("no request has needed a tokenizer yet")
        return "; ".join(map(encoder_line, encoders))

    async def _unknown_at(self, worker: str, body: dict[str, Any]) -> bool:
        answer = (await self._ask("POST", "/admin/explain", body)).json()
        hits = {row["worker"]: row["hit_tokens"] for row in answer["workers"]}
        return not hits.get(worker)

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, *, key: str | None = None
    ) -> httpx.Response:
        key = self._settings.admin_key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = await self._client.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise Broken(
                f"the gateway closed the connection at {path} ({error!r})", "see its log"
            ) from error
        if answer.status_code in (401, 403):
            name = "API_KEY" if path.startswith("/v1/") else "ADMIN_KEY"
            raise Broken(
                f"{path} answers {answer.status_code}: {answer.text}",
                f"set STEMROUTE_GATEWAY_{name} as the gateway has it",
            )
        if answer.status_code != 200 and path != "/ready":
            raise Broken(
                f"{path} answers {answer.status_code}: {answer.text}",
                "the answer and the gateway's log say what is missing",
            )
        return answer

    def _need_gateway(self) -> None:
        if not self._answers:
            raise Skip("no gateway answers")
