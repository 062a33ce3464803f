"""Text to tokens to block hashes, with the tokenizer and chat template of a worker.

The gateway has no model files. It fetches `ModelInfo` from any ready worker of the model, so its
hashes are those that the workers cache.

Every prompt is rendered whole. A beginning that equals the beginning of an earlier text is not
encoded and hashed again (`router/known_texts.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from cluster.protocol import SERVICE_UNAVAILABLE, ModelInfo, RequestError, WorkerCard
from router.background import Background
from router.boundaries import Boundaries
from router.chat_template import ChatTemplate
from router.encoding import EncoderInfo, TextEncoder, TooManyTokens
from router.known_texts import KnownTexts
from router.openai_api import ApiRequest

AT_ONCE_BYTES = 65_536
"""Larger bodies are rendered, encoded and hashed in a thread. This size blocks the event loop for
some 3 ms, or 20 ms if every character is a token; a thread costs 0.1 ms."""

TOOLS_GROWTH = 8
"""A body with tools counts as so many times larger, because a template may indent them: rendered,
8 kB are at most 1 MB."""

KEPT_ENCODERS = 8
KEPT_ROOTS = 10_000


class Prompt(NamedTuple):
    """A tokenised and hashed prompt.

    token_ids   packed, 4 bytes per token
    chain       hashes of its full blocks
    namespace   namespace of the model when it was hashed, without the request's own fields
    """

    token_ids: bytes
    chain: Sequence[bytes]
    namespace: Namespace

    @property
    def tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.token_ids) // 4


class Encoder:
    """Tokenizer and chat template of one model. Thread-safe."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.text_encoder = TextEncoder(info.tokenizer_json)
        self.boundaries = Boundaries(
            info.tokenizer_json,
            "".join(
                [
                    info.chat_template,
                    info.tool_chat_template,
                    *map(str, info.special_tokens.values()),
                ]
            ),
        )
        self.bos = b""
        if info.add_bos:
            bos = self.text_encoder.token_id(info.special_tokens.get("bos_token", ""))
            if bos is None:
                raise ValueError("the model requires a bos token but its tokenizer has none")
            self.bos = pack_tokens([bos])
        self._template = _template(info.chat_template, info)
        self._tool_template = _template(info.tool_chat_template, info) or self._template

    def render(self, request: ApiRequest) -> str:
        """The text of a chat. Raises RequestError (400) if the template refuses it, or would ignore
        the request's tools."""
        template = self._tool_template if request.tools else self._template
        if template is None:
            raise RequestError(
                f"the model `{self.info.model}` has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        if request.tools and not template.uses_tools:
            raise RequestError(
                f"the chat template of the model `{self.info.model}` does not use tools: leave "
                '`tools` out, or set `tool_choice` to "none"',
                param="tools",
                code="tools_not_supported",
            )
        try:
            return template.render(request.messages or [], request.tools, request.template_fields)
        except Exception as error:  # a template may raise anything for a client's messages
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def encode(self, text: str, *, bos: bool) -> bytes:
        """Packed tokens of a text; with `bos`, after the bos token if the model requires one.

        Raises RequestError (400) for a text with an unpaired surrogate.
        """
        packed = self.text_encoder.encode(text)
        return self.bos + packed if bos else packed

    def check_ids(self, ids: list[int]) -> None:
        """Raises RequestError (400) for an id that the model does not have."""
        rows = self.info.embedding_rows or self.text_encoder.vocabulary
        for token in (min(ids), max(ids)):
            if not 0 <= token < rows:
                raise RequestError(
                    f"`prompt` holds the token id {token}: the model's ids go from 0 to {rows - 1}",
                    param="prompt",
                )


class Tokenization:
    """Tokenises and hashes prompts; caches encoders and recent hashes.

    fetch        gets `ModelInfo` from the worker of a card; raises CallFailed
    secret       pool secret, which goes into every hash
    background   runs long work in threads
    """

    def __init__(
        self,
        fetch: Callable[[WorkerCard], Awaitable[ModelInfo]],
        secret: bytes,
        background: Background,
    ) -> None:
        self._fetch = fetch
        self._secret = secret
        self._background = background
        self._encoders: OrderedDict[str, Encoder] = OrderedDict()
        self._fetching: dict[str, asyncio.Lock] = {}
        self._roots: dict[tuple[Namespace, str], bytes] = {}
        self._texts = KnownTexts()

    def encoder_infos(self) -> list[EncoderInfo]:
        """The library that encodes for each fetched tokenizer."""
        return [
            encoder.text_encoder.info(digest, encoder.info.model)
            for digest, encoder in self._encoders.items()
        ]

    def known_encoder(self, namespace: Namespace) -> Encoder | None:
        """The encoder for workers of this namespace; None if it was not fetched yet."""
        encoder = self._encoders.get(namespace.tokenizer)
        if encoder is not None:
            self._encoders.move_to_end(namespace.tokenizer)
        return encoder

    async def encoder(self, cards: Sequence[WorkerCard]) -> Encoder:
        """The encoder for workers that share one namespace.

        Asks one worker after the other. Raises RequestError (503) if none returns the model of
        its card.
        """
        digest = cards[0].namespace.tokenizer
        if digest not in self._encoders:
            async with self._fetching.setdefault(digest, asyncio.Lock()):
                if digest not in self._encoders:
                    self._encoders[digest] = await self._fetch_any(cards)
                    while len(self._encoders) > KEPT_ENCODERS:
                        old, _ = self._encoders.popitem(last=False)
                        self._fetching.pop(old, None)
        self._encoders.move_to_end(digest)
        return self._encoders[digest]

    async def prompt(
        self, request: ApiRequest, encoder: Encoder, namespace: Namespace, context_tokens: int
    ) -> Prompt:
        """Tokens and hashes of a request.

        Raises RequestError (400), also if the prompt leaves no room for output in a context of
        `context_tokens`.
        """
        root = self._root(namespace, request.cache_salt)

        def work() -> Prompt:
            try:
                packed, chain = self._compute(
                    request, encoder, root, namespace.block_size, context_tokens - 1
                )
            except TooManyTokens as error:
                raise context_too_short(request, error, context_tokens) from error
            if not packed:
                raise RequestError("the prompt has no tokens: send some text", param="prompt")
            return Prompt(packed, chain, namespace)

        size = request.body_bytes * (TOOLS_GROWTH if request.tools else 1)
        return await self._background.run(size, AT_ONCE_BYTES, work)

    def _compute(
        self, request: ApiRequest, encoder: Encoder, root: bytes, block_size: int, most: int
    ) -> tuple[bytes, list[bytes]]:
        """Packed tokens and hashes. Raises TooManyTokens for more than `most` tokens."""
        ids = request.token_ids
        if ids is not None:
            encoder.check_ids(ids)
            if len(ids) > most:
                raise TooManyTokens(len(ids), exact=True)
            packed = pack_tokens(ids)
            return packed, hash_blocks(root, packed, block_size)
        text = encoder.render(request) if request.text is None else request.text
        text_encoder = encoder.text_encoder
        text_encoder.check_size(text, most)
        packed, chain = self._texts.tokens_and_hashes(
            text,
            encoder.boundaries,
            lambda run: text_encoder.encode(run, most),
            bos=b"" if request.text is None else encoder.bos,
            root=root,
            block_size=block_size,
        )
        if len(packed) > 4 * most:
            raise TooManyTokens(len(packed) // 4, exact=True)
        return packed, chain

    def _root(self, namespace: Namespace, tenant: str) -> bytes:
        key = (namespace, tenant)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= KEPT_ROOTS:
                self._roots.clear()
            root = namespace.for_request(tenant=tenant).root(self._secret)
            self._roots[key] = root
        return root

    async def _fetch_any(self, cards: Sequence[WorkerCard]) -> Encoder:
        reasons = []
        for card in cards:
            try:
                info = await self._fetch(card)
                if info.namespace != card.namespace:
                    raise ValueError("its tokenizer or model does not match its card")
                return await asyncio.to_thread(Encoder, info)
            except Exception as error:  # tokenizers raises plain Exception
                reasons.append(f"{card.worker}: {str(error) or type(error).__name__}")
        raise RequestError(
            "no worker returned the tokenizer of the model: " + "; ".join(reasons),
            status=503,
            type=SERVICE_UNAVAILABLE,
            code="no_tokenizer",
        )


def _template(source: str, info: ModelInfo) -> ChatTemplate | None:
    return ChatTemplate(source, info.special_tokens) if source else None


def context_too_short(
    request: ApiRequest, prompt: TooManyTokens, context_tokens: int
) -> RequestError:
    """The refusal (400) of a prompt that leaves no room for output."""
    tokens = f"{prompt.tokens}" if prompt.exact else f"at least {prompt.tokens}"
    return RequestError(
        f"the context of `{request.model}` is {context_tokens} tokens, but the prompt has "
        f"{tokens} and the output needs at least 1: shorten the prompt",
        param="prompt" if request.messages is None else "messages",
        code="context_length_exceeded",
    )
