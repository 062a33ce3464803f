"""The gateway's edge: routing to handlers, authentication, and errors as OpenAI error objects."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from cluster.protocol import SERVICE_UNAVAILABLE, RequestError
from cluster.settings import GatewaySettings
from router.cors import Cors, preflight
from router.counts import RequestCounts
from router.http_connection import Service
from router.http_messages import ClientGone, Handler, Request, Response

log = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=msgspec.Struct)

CLIENT_GONE_STATUS = 499
RETRY_AFTER_S = 1
"""Of a refusal that does not say when to come back."""
ARGUMENT = "{"
"""Where the argument of a path begins, as in "/v1/models/{model}"; it is the rest of the path."""

PROXY_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
"""Headers of which a proxy adds at least one, unless it is set up not to."""

STOPPING = RequestError(
    "this gateway is shutting down and could not finish the request: retry",
    status=503,
    type=SERVICE_UNAVAILABLE,
    code="gateway_stopping",
)

_JSON = {"Content-Type": "application/json"}
_MORE_HEADERS = {401: {"WWW-Authenticate": "Bearer"}}


class Route(NamedTuple):
    """`handler` handles `method` at `path`."""

    method: str
    path: str
    handler: Handler


def json_response(value: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status, _JSON)


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The OpenAI error object. 429 and 503 get `retry-after`, 401 gets `www-authenticate`."""
    more = _MORE_HEADERS.get(error.status, {})
    if error.status in (429, 503):
        more = {"Retry-After": str(error.retry_after_s or RETRY_AFTER_S)}
    return Response(error.body(), error.status, {**_JSON, **more, **(headers or {})})


def _with_error(request: Request, error: RequestError) -> Response | None:
    """End the request with an error: an event if its stream has begun. Raises ClientGone."""
    if request.stream is None or not request.stream.started:
        return error_response(error, {"Allow": request.allowed} if request.allowed else None)
    if not request.stream.ended:
        request.stream.end(b"data: " + error.body() + b"\n\n")
    return None


def admin_body(body: bytes, kind: type[_Body], form: str, param: str) -> _Body:
    """The body of an admin call as `kind`; errors show `form`. Raises RequestError (400)."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise RequestError(
            f"the body nests objects and arrays too deeply: send {form}", param=param
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body must be of the form {form}: {error}", param=param) from error


class Edge:
    """Finds handlers, checks keys, and counts requests by endpoint and status.

    endpoint "none": no such path or method; "preflight": a browser's CORS preflight
    """

    def __init__(self, settings: GatewaySettings, requests: RequestCounts) -> None:
        self._settings = settings
        self._requests = requests
        self._cors = Cors(settings.cors_origins)
        self._endpoints: dict[str, dict[str, Handler]] = {}

    def service(self) -> Service:
        """For the HTTP server."""
        settings = self._settings
        return Service(
            admit=self.admit,
            answer=self.answer,
            malformed=malformed,
            too_large=body_too_large(settings.max_body_bytes),
            max_body_bytes=settings.max_body_bytes,
            too_much=too_many_bytes(settings.max_held_body_bytes),
            full=too_many_connections(settings.max_connections),
        )

    def add(self, routes: Sequence[Route]) -> None:
        """Add routes."""
        for route in routes:
            self._endpoints.setdefault(route.path, {})[route.method] = route.handler

    def admit(self, request: Request) -> None:
        """Set the request's handler or refusal."""
        if self._cors.admit(request):  # browsers send no key with a preflight
            request.endpoint, request.handler = "preflight", preflight
            return
        missing = self._find(request)
        try:
            self._authenticate(request)
        except RequestError as error:
            request.refusal = error
            return
        coding = request.headers.get("content-encoding", "identity")
        if coding != "identity":
            missing = missing or RequestError(
                f"the content encoding {coding!r} is not supported: send the body uncompressed",
                status=415,
                code="unsupported_coding",
            )
        request.refusal = missing

    async def answer(self, request: Request) -> Response | None:
        """Handle the request and turn errors into responses; None if the response was a stream."""
        status = 500
        try:
            response = await self._answer(request)
            status = 200 if response is None else response.status
            return response
        except (asyncio.CancelledError, ClientGone):
            if not request.cut_off:
                status = CLIENT_GONE_STATUS
                raise
            response = _with_error(request, STOPPING)
            status = 200 if response is None else response.status
            return response
        finally:
            self._requests.note(request.endpoint, status)

    async def _answer(self, request: Request) -> Response | None:
        try:
            if request.refusal is not None:
                raise request.refusal
            assert request.handler is not None
            return await request.handler(request)
        except RequestError as error:
            return _with_error(request, error)
        except ClientGone:
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            if request.stream is not None and request.stream.started:
                return None  # which cuts the connection
            return error_response(
                RequestError(
                    "the gateway failed to handle this request; see its log",
                    status=500,
                    type="server_error",
                    code="internal_error",
                )
            )

    def _find(self, request: Request) -> RequestError | None:
        """Set handler and endpoint, or return why there are none."""
        path, method = request.path, "GET" if request.method == "HEAD" else request.method
        endpoint = path if path in self._endpoints else self._with_argument(request)
        methods = self._endpoints.get(endpoint)
        if methods is None:
            return RequestError(
                f"there is no endpoint {path}: send to /v1/chat/completions, "
                "/v1/completions or /v1/models",
                status=404,
                code="unknown_url",
            )
        if method not in methods:
            request.allowed = ", ".join(sorted(methods))
            return RequestError(
                f"{path} does not accept {method}: send {request.allowed}",
                status=405,
                code="method_not_allowed",
            )
        request.endpoint, request.handler = endpoint, methods[method]
        return None

    def _with_argument(self, request: Request) -> str:
        """The endpoint whose argument is the rest of the request's path; "" for none."""
        for endpoint in self._endpoints:
            fixed, argument, _ = endpoint.partition(ARGUMENT)
            if argument and request.path.startswith(fixed) and request.path != fixed:
                request.argument = request.path.removeprefix(fixed)
                return endpoint
        return ""

    def _authenticate(self, request: Request) -> None:
        """Require the API key for `/v1` and the admin key for `/admin`."""
        settings = self._settings
        if settings.api_key and request.path.startswith("/v1/"):
            if not _bearer_is(request, settings.api_key):
                raise _unauthorised("API")
        elif request.path.startswith("/admin/"):
            _admit_admin(request, settings.admin_key)


def body_too_large(limit_bytes: int) -> RequestError:
    """413, with the limit."""
    return RequestError(
        f"the body exceeds the limit of {limit_bytes} bytes: send a shorter one",
        status=413,
        code="body_too_large",
    )


def too_many_bytes(limit_bytes: int) -> RequestError:
    """503, with the limit."""
    return RequestError(
        f"the requests under way fill this gateway's limit of {limit_bytes} bytes of bodies: retry "
        "in a moment",
        status=503,
        type=SERVICE_UNAVAILABLE,
        code="too_many_bytes",
    )


def too_many_connections(limit: int) -> Response:
    """503, with the limit."""
    return error_response(
        RequestError(
            f"this gateway has reached its limit of {limit} connections: retry in a moment",
            status=503,
            type=SERVICE_UNAVAILABLE,
            code="too_many_connections",
        )
    )


def no_ready_worker(found: str) -> RequestError:
    """503, with the cause `found`."""
    return RequestError(
        f"{found}: retry in a moment; /ready says what is missing",
        status=503,
        type=SERVICE_UNAVAILABLE,
        code="no_ready_worker",
    )


def malformed(reason: str, status: int) -> RequestError:
    """The refusal of bytes that are not HTTP or exceed a limit."""
    return RequestError(f"the request is malformed: {reason}", status=status, code="bad_request")


def _admit_admin(request: Request, key: str) -> None:
    """Admit holders of the key; without a key, clients on this machine.

    Without a key, requests through a proxy are refused, as they may come from anywhere, and so are
    those that a web page of another origin made a browser send.
    """
    if key:
        if not _bearer_is(request, key):
            raise _unauthorised("admin")
        return
    headers = request.headers
    proxied = not PROXY_HEADERS.isdisjoint(headers)
    if proxied or _is_foreign(headers) or not _is_local(request.remote):
        raise RequestError(
            "without an admin key, /admin is open to clients on the gateway's machine only: set "
            "gateway.admin_key (STEMROUTE_GATEWAY_ADMIN_KEY) and send it as a bearer token",
            status=403,
            type="permission_error",
            code="admin_not_allowed",
        )


def _is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another origin may have made a browser send the request.

    With DNS rebinding, a page's own host name resolves to this machine, and the browser sees the
    same origin. Such a name has a dot and is not an IP address.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if origin is not None and urlsplit(origin).netloc != host:
            return True
    except ValueError:
        return True
    return "." in name.removesuffix(".localhost") and not _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(remote: str) -> bool:
    try:
        return ipaddress.ip_address(remote.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _bearer_is(request: Request, key: str) -> bool:
    """Compare in constant time."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, key.encode()) and scheme.lower() == "bearer"


def _unauthorised(which: str) -> RequestError:
    return RequestError(
        f"the {which} key is missing or wrong: send it as `Authorization: Bearer KEY`",
        status=401,
        type="authentication_error",
        code="invalid_api_key",
    )
