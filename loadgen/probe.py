"""What the model makes of a text's words, asked of the gateway itself."""

from __future__ import annotations

import httpx
import msgspec

from loadgen.admin import ADMIN_TIMEOUT_S, Admin, AdminError
from loadgen.blocktext import MAX_ID, block_text

PROBE_WORDS = (64, 320)
"""Two lengths: their difference leaves out what the chat template adds."""


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


class _Message(msgspec.Struct):
    role: str
    content: str


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message]
    max_tokens: int = 1
    temperature: float = 0.0


class GatewayProbe:
    """`loadgen.plan.ModelProbe` of a live gateway. Methods raise AdminError."""

    def __init__(self, url: str, admin: Admin, api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._admin = admin
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def model(self) -> str:
        """The first model served."""
        return await self._admin.model()

    async def tokens_per_word(self, model: str) -> float:
        """From the `usage` of two short requests."""
        # trust_env off: a proxy of the environment is not meant for the gateway.
        async with httpx.AsyncClient(timeout=ADMIN_TIMEOUT_S, trust_env=False) as http:
            short, long = [await self._tokens(http, model, words) for words in PROBE_WORDS]
        found = (long - short) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        if found <= 0:
            raise AdminError(
                f"{self._url} says that a longer prompt has no more tokens ({short}, {long}): "
                "its usage cannot be trusted"
            )
        return found

    async def _tokens(self, http: httpx.AsyncClient, model: str, words: int) -> int:
        body = _Body(model, [_Message("user", block_text(MAX_ID - 1, words))])
        try:
            answer = await http.post(
                f"{self._url}/v1/chat/completions",
                headers=self._headers,
                content=msgspec.json.encode(body),
            )
        except httpx.HTTPError as error:
            raise AdminError(f"no answer from {self._url} to a probe: {error!r}") from error
        if answer.status_code != 200:
            raise AdminError(
                f"{self._url} answered a probe of {words} words with {answer.status_code}: "
                f"{answer.text[:300]}"
            )
        try:
            return msgspec.json.decode(answer.content, type=_Answer).usage.prompt_tokens
        except msgspec.DecodeError as error:
            raise AdminError(f"{self._url} answered a probe without usage: {error}") from error
