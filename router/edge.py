"""The gateway's edge: who may ask, and how every failure becomes an OpenAI error object."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cluster.protocol import RequestError
from cluster.settings import GatewaySettings
from router.forwarding import ClientGone
from router.metrics import Metrics

log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
RETRY_AFTER_S = 1

STARTED: web.RequestKey[bool] = web.RequestKey("started", bool)
"""Set on a request once the first bytes of its answer are out."""


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def error_response(error: RequestError) -> web.Response:
    """The OpenAI error object; 429 and 503 say when to come back."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    return web.Response(
        body=error.body(), status=error.status, headers=headers, content_type="application/json"
    )


async def mark_started(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: from here on no other answer can be given."""
    request[STARTED] = True


def errors(settings: GatewaySettings, metrics: Metrics) -> Middleware:
    """Outermost middleware: answers every failure, and counts requests by status."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 500
        try:
            response = await _answer(request, handler, settings)
            status = response.status
            return response
        except asyncio.CancelledError:
            status = CLIENT_GONE_STATUS
            raise
        except ClientGone as gone:
            status = CLIENT_GONE_STATUS
            return gone.response
        finally:
            route = request.match_info.route.resource
            endpoint = route.canonical if route is not None else "none"
            metrics.requests.labels(endpoint, str(status)).inc()

    return middleware


async def _answer(
    request: web.Request, handler: Handler, settings: GatewaySettings
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        return error_response(body_too_large(settings.max_body_bytes))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = error_response(
            RequestError(
                f"{request.path} does not take {request.method}: send {allowed}",
                status=405,
                code="method_not_allowed",
            )
        )
        answer.headers["Allow"] = allowed
        return answer
    except web.HTTPNotFound:
        return error_response(
            RequestError(
                f"there is no {request.path} here: send to /v1/chat/completions, "
                "/v1/completions or /v1/models",
                status=404,
                code="unknown_url",
            )
        )
    except web.HTTPException as error:
        return error_response(RequestError(error.reason, status=error.status))
    except (web.RequestPayloadError, aiohttp.http_exceptions.BadHttpMessage) as error:
        return error_response(RequestError(f"the body cannot be read: {error}"))
    except (asyncio.CancelledError, ClientGone):
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        if request.get(STARTED, False):
            raise
        return error_response(
            RequestError(
                "the gateway failed at this request; its log says why",
                status=500,
                type="server_error",
                code="internal_error",
            )
        )


def body_too_large(limit_bytes: int) -> RequestError:
    """413, with the limit."""
    return RequestError(
        f"the body is over the limit of {limit_bytes} bytes: send a shorter one",
        status=413,
        code="body_too_large",
    )


def authentication(settings: GatewaySettings) -> Middleware:
    """Asks `/v1` for the API key and `/admin` for the admin key."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/v1/") and settings.api_key:
            if not _bearer_is(request, settings.api_key):
                raise _unauthorised("API")
        elif request.path.startswith("/admin/"):
            _admit_admin(request, settings.admin_key)
        return await handler(request)

    return middleware


def _admit_admin(request: web.Request, key: str) -> None:
    """With a key, whoever has it; without one, clients on this machine.

    A request that came through a proxy may be anybody's, and one that a web page of another
    origin made a browser send is not the administrator's.
    """
    if key:
        if not _bearer_is(request, key):
            raise _unauthorised("admin")
        return
    proxied = "X-Forwarded-For" in request.headers or "Forwarded" in request.headers
    origin = request.headers.get("Origin")
    foreign = origin is not None and urlsplit(origin).netloc != request.host
    if proxied or foreign or not _is_local(request.remote):
        raise RequestError(
            "without an admin key, /admin is open to clients on the gateway's machine only: set "
            "gateway.admin_key (STEMROUTE_GATEWAY_ADMIN_KEY) and send it as a bearer token",
            status=403,
            type="permission_error",
            code="admin_not_allowed",
        )


def _is_local(remote: str | None) -> bool:
    try:
        return ipaddress.ip_address((remote or "").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _bearer_is(request: web.Request, key: str) -> bool:
    """Compares in constant time."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, key.encode()) and scheme.lower() == "bearer"


def _unauthorised(which: str) -> RequestError:
    return RequestError(
        f"the {which} key is missing or wrong: send it as `Authorization: Bearer KEY`",
        status=401,
        type="authentication_error",
        code="invalid_api_key",
    )
