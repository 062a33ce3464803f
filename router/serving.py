"""A generation request, from its parsed body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from functools import partial
from math import inf

import msgspec

from cluster.protocol import (
    HEADER_EXPLAIN,
    HEADER_IGNORED_FIELDS,
    HEADER_TIMEOUT,
    GenerateRequest,
    RequestError,
)
from cluster.settings import GatewaySettings
from router.admission import Admission, Tell, Told, no_worker
from router.blame import Blame
from router.delivery import Delivery
from router.dispatch import Dispatcher, Placement
from router.edge import no_ready_worker
from router.encoding import TooManyTokens
from router.explaining import Explanation
from router.forwarding import Answered, Forwarder
from router.http_messages import Request, Response
from router.member import ModelGroup
from router.metrics import Metrics
from router.openai_api import ApiRequest
from router.tokenization import Prompt, Tokenization, context_too_short

log = logging.getLogger(__name__)

MAX_TIMEOUT_DIGITS = 10


class Serving:
    """Serves requests with the components of the gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        admission: Admission,
        tokenization: Tokenization,
        forwarder: Forwarder,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._admission = admission
        self._tokenization = tokenization
        self._forwarder = forwarder
        self._metrics = metrics

    async def serve(self, client: Request, asked: ApiRequest, arrived: float) -> Response | None:
        """Serve the request of `client`. Returns a whole response; None if it was streamed.

        arrived   `time.perf_counter()` when the request arrived

        A failed attempt is followed by one at another worker, which goes on where it ended. What
        cannot go on ends with an error event if the client has received a part of it.
        Raises RequestError and ClientGone. If the client disconnects, the server cancels this call,
        which removes the request from the queue or cancels it at its worker. The end of the time
        that the client allows does the same.
        """
        timeout_s = _timeout_s(client, arrived)
        if timeout_s is None:
            return await self._serve(client, asked, arrived, inf)
        try:
            async with asyncio.timeout(timeout_s):
                deadline = self._fleet.clock() + timeout_s
                return await self._serve(client, asked, arrived, deadline)
        except TimeoutError:
            raise RequestError(
                f"the response was not complete within the time of {HEADER_TIMEOUT}: allow more, "
                "or ask for fewer tokens",
                status=504,
                type="server_error",
                code="deadline_exceeded",
            ) from None

    async def _serve(
        self, client: Request, asked: ApiRequest, arrived: float, deadline: float
    ) -> Response | None:
        model, request_id = asked.model, secrets.token_hex(16)
        if asked.ignored_fields:
            client.response_headers[HEADER_IGNORED_FIELDS] = ", ".join(asked.ignored_fields)
        if client.headers.get(HEADER_EXPLAIN) == "1":
            self._dispatcher.recent.want(request_id, asked.kind)
        failure: RequestError | None = None
        prompt: Prompt | None = None
        delivery, blame = Delivery(client), Blame(self._fleet, self._forwarder)
        tried: list[str] = []
        with self._admission.ticket(model, request_id, asked.priority, deadline) as ticket:
            while self._may_try(delivery, len(tried) - blame.excused):
                # find the workers that may serve
                group = self._fleet.group(model)
                if group is None or group.reference is None or not group.mask:
                    if tried:
                        break  # a retry does not wait
                    await _told(ticket.wait_for_worker)
                    continue
                # the prompt is not hashed yet, or for workers that have been replaced
                if prompt is None or prompt.namespace != group.reference.namespace:
                    if delivery.begun:
                        break  # other weights cannot go on
                    if not tried:
                        ticket.check_wait()  # before any work is done
                    prompt = await self._tokenise(asked, group)
                    delivery.generate = self._to_worker(
                        asked, request_id, prompt, group.context_tokens
                    )
                    continue
                # choose one of them
                if tried:
                    placement = ticket.move(prompt, tried)
                    if placement is None:
                        break
                else:
                    placement = await _told(partial(ticket.place, prompt))
                    if placement is None:
                        continue  # while it waited, the workers left or were replaced
                # attempt the request there
                if delivery.resumes:
                    delivery.migrations += 1
                    self._metrics.attempts.migrations += 1
                began = partial(self._began, placement, prompt, request_id, arrived)
                outcome = await self._forwarder.attempt(delivery, placement, began)
                if isinstance(outcome, Answered):
                    if outcome.response is None or outcome.response.status == 200:
                        self._fleet.trust.note(placement.booking, failed=False)
                    return outcome.response
                failure = outcome.error
                if outcome.reason != "full":
                    self._fleet.trust.note(placement.booking, failed=True)
                self._metrics.attempts.note(outcome.reason)
                log.info("request %s: worker %s: %s", request_id, placement.worker, failure)
                if outcome.reason == "timeout":
                    break  # the client has waited long enough
                if outcome.reason == "connect":
                    self._fleet.trust.suspect(placement.worker, "it refused a connection")
                tried.append(placement.worker)
                if own := await blame.own(delivery, placement, outcome):
                    failure = own
                    break
                if delivery.resumes:
                    generate = delivery.generate
                    prompt = prompt._replace(token_ids=generate.token_ids + generate.output_ids)
            if delivery.begun:
                self._metrics.attempts.broken_streams += 1
            if failure is None:
                failure = no_ready_worker(f"no worker of the model `{model}` is ready")
            raise failure  # which becomes an event of a stream that has begun

    def _may_try(self, delivery: Delivery, tried: int) -> bool:
        if tried and delivery.resumes:
            return delivery.migrations < self._settings.migrations
        return not delivery.begun and tried < self._settings.attempts

    async def explain(self, asked: ApiRequest) -> Explanation:
        """Decide as for this request, without sending it. Raises RequestError."""
        group = self._fleet.group(asked.model)
        if group is None or not group.mask:
            raise no_worker(self._fleet, asked.model)
        prompt = await self._tokenise(asked, group)
        return self._dispatcher.explain(asked.model, asked.kind, prompt)

    async def _tokenise(self, asked: ApiRequest, group: ModelGroup) -> Prompt:
        """The prompt, tokenised and hashed for the workers of `group`, one of which is ready."""
        namespace = self._fleet.at(int(group.slots[0])).card.namespace
        encoder = self._tokenization.known_encoder(namespace)
        if encoder is None:
            cards = [self._fleet.at(int(slot)).card for slot in group.slots]
            encoder = await self._tokenization.encoder(cards)
        return await self._tokenization.prompt(asked, encoder, namespace, group.context_tokens)

    def _to_worker(
        self, asked: ApiRequest, request_id: str, prompt: Prompt, context_tokens: int
    ) -> GenerateRequest:
        """The body for a worker. Raises RequestError (400) if the context is too short."""
        room = context_tokens - prompt.tokens
        if room < 1:
            raise context_too_short(asked, TooManyTokens(prompt.tokens, exact=True), context_tokens)
        wanted = asked.max_tokens or self._settings.default_max_tokens
        sampling = msgspec.structs.replace(asked.sampling, max_tokens=min(wanted, room))
        if sampling.seed is None and sampling.temperature:  # the same one at each worker
            sampling = msgspec.structs.replace(sampling, seed=random.getrandbits(63))
        return GenerateRequest(
            request_id=request_id,
            model=asked.model,
            kind=asked.kind,
            token_ids=prompt.token_ids,
            sampling=sampling,
            stream=asked.stream,
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            cache_salt=asked.cache_salt,
            request_type=asked.request_type,
            turn=asked.turn,
            priority=asked.priority,
            created=int(time.time()),
            progress=True,
        )

    def _began(
        self,
        placement: Placement,
        prompt: Prompt,
        request_id: str,
        arrived: float,
        hit_tokens: int,
    ) -> None:
        """The first byte of a response has arrived: the prefill is done."""
        self._metrics.answers.note(
            first_byte_s=time.perf_counter() - arrived,
            prompt=prompt.tokens,
            predicted=placement.predicted_hit_tokens,
            hit=hit_tokens,
            best_hit=placement.candidates.best_hit_tokens,
        )
        self._dispatcher.shadows.began(request_id)


def _timeout_s(client: Request, arrived: float) -> float | None:
    """Seconds that are left for the response; None: the client does not say. Raises RequestError
    (400)."""
    text = client.headers.get(HEADER_TIMEOUT)
    if text is None:
        return None
    if not text.isdecimal() or not 0 < len(text) <= MAX_TIMEOUT_DIGITS or not int(text):
        raise RequestError(f"{HEADER_TIMEOUT} must be a number of milliseconds, at least 1")
    return int(text) / 1000 - (time.perf_counter() - arrived)


async def _told(ask: Callable[[Tell], None]) -> Placement | None:
    """Wait until `ask` calls its callback. Raises the RequestError that it passes."""
    waiting: asyncio.Future[Told] = asyncio.get_running_loop().create_future()

    def tell(told: Told) -> None:
        if not waiting.done():  # the request may have been cancelled in this turn of the loop
            waiting.set_result(told)

    ask(tell)
    told = await waiting
    if isinstance(told, RequestError):
        raise told
    return told
