"""Cross-origin requests (CORS, WHATWG Fetch): which web pages may call `/v1` from a browser."""

from __future__ import annotations

from cluster import protocol
from router.http_messages import Request, Response

MAX_AGE_S = 600
EXPOSED = ", ".join(
    sorted(value for name, value in vars(protocol).items() if name.startswith("HEADER_"))
)


class Cors:
    """Decides which origins may call.

    origins   separated by commas; "*" admits every origin, "" none
    """

    def __init__(self, origins: str) -> None:
        self._origins = {origin.strip().rstrip("/") for origin in origins.split(",")} - {""}

    def admit(self, request: Request) -> bool:
        """Set the response headers that a browser needs. Returns whether it is a preflight, which
        `preflight` handles."""
        origin = request.headers.get("origin")
        if not self._origins or origin is None or not request.path.startswith("/v1/"):
            return False
        headers = request.response_headers
        headers["Vary"] = "Origin"
        if not self._origins & {"*", origin}:
            return False
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Expose-Headers"] = EXPOSED
        asked = request.headers.get("access-control-request-method")
        if request.method != "OPTIONS" or asked is None:
            return False
        headers["Access-Control-Allow-Methods"] = "GET, POST"
        headers["Access-Control-Allow-Headers"] = request.headers.get(
            "access-control-request-headers", "authorization, content-type"
        )
        headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
        return True


async def preflight(request: Request) -> Response:
    """The response to a preflight; only its headers matter."""
    return Response(b"")
