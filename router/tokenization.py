"""Text to tokens to block hashes, with the tokenizer and chat template of a worker.

The gateway holds no model files: it fetches `ModelInfo` from any ready worker of the model, so
what it hashes is what the workers cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import tokenizers

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from cluster.protocol import SERVICE_UNAVAILABLE, ModelInfo, RequestError, WorkerCard
from router.chat_template import ChatTemplate, Message, NotByMessage
from router.openai_api import ApiRequest
from router.segments import Cutter, Found, Name, SegmentTree, boundary_tokens, compute
from router.words import Words

THREAD_CHARACTERS = 8_000
"""Longer texts are tokenised in a thread: about 2 ms of work that would hold up all streams."""

MAX_NEW_MESSAGES = 200
"""Of a chat, for rendering them one by one: some 2 ms. Each takes 15 times as long as in a chat
that is rendered whole, so a body of many short messages would hold up all streams."""

CACHE_CHARACTERS = 8_000_000
"""Text and tokens of this many characters are kept for requests with an equal text."""

KEPT_ENCODERS = 8
KEPT_ROOTS = 10_000

_TAIL: Name = ()

_Result = TypeVar("_Result")


class Prompt(NamedTuple):
    """A prompt as workers know it.

    token_ids   packed, 4 bytes a token
    chain       hashes of its full blocks
    namespace   of the model when it was hashed, without the request's own fields
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
        self._tokenizer = tokenizers.Tokenizer.from_str(info.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._words = Words(self._tokenizer, info.tokenizer_json)
        self._bos = b""
        if info.add_bos:
            bos = self._tokenizer.token_to_id(info.special_tokens.get("bos_token", ""))
            if bos is None:
                raise ValueError("the model wants a bos token but its tokenizer has none")
            self._bos = pack_tokens([bos])
        self._template = (
            ChatTemplate(info.chat_template, info.special_tokens) if info.chat_template else None
        )
        self._cutter = Cutter(
            boundary_tokens(info.tokenizer_json),
            info.chat_template + "".join(map(str, info.special_tokens.values())),
        )
        self.cut = self._cutter.cut

    def render(self, request: ApiRequest) -> str:
        """The text of a chat. Raises RequestError (400) where the template refuses it."""
        if self._template is None:
            raise RequestError(
                f"the model `{self.info.model}` has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        try:
            return self._template.render(
                request.messages or [], request.tools, request.template_fields
            )
        except Exception as error:  # whatever a template does with a client's messages
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def learn_words(self, stop: Callable[[], bool]) -> None:
        """Tokenise the vocabulary's words beforehand; ends early once `stop()`."""
        self._words.learn(self._tokenizer.get_vocab(with_added_tokens=False), stop)

    def names(self, request: ApiRequest) -> list[Name]:
        """Names of a chat's segments, one a message and one for what follows the last; empty
        where the chat must be rendered whole."""
        if (
            self._template is None
            or not self._template.by_message
            or request.messages is None
            or request.tools is not None
            or request.template_fields
        ):
            return []
        names: list[Name] = [(m["role"], m["content"]) for m in request.messages if len(m) == 2]
        return [*names, _TAIL] if len(names) == len(request.messages) else []

    def segments(self, messages: list[Message], first: int) -> list[str]:
        """The segments of a chat from that of the message `first` on. Raises NotByMessage."""
        template = self._template
        assert template is not None
        if first > len(messages):
            return []
        if len(messages) - first > MAX_NEW_MESSAGES:
            raise NotByMessage
        places = range(first, len(messages))
        texts = [*(template.part(messages, place) for place in places), template.tail(messages)]
        if all(map(self._cutter.starts, texts if first else texts[1:])):
            return texts
        raise NotByMessage

    def encode(self, text: str, *, bos: bool) -> bytes:
        """Packed tokens of a text; with `bos`, after the bos token where the model wants one.

        Raises RequestError (400) for a text with lone surrogates, which is no Unicode.
        """
        try:
            packed = self._words.encode(text)
        except TypeError as error:
            raise RequestError(
                "the text holds half a surrogate pair, which is no Unicode: send it as UTF-8"
            ) from error
        return self._bos + packed if bos else packed


class Tokenization:
    """Prompts of requests, tokenised and hashed; encoders and recent prompts are kept.

    fetch    gets `ModelInfo` from the worker of a card; raises OSError or ValueError
    secret   of the pool, goes into every hash
    """

    def __init__(self, fetch: Callable[[WorkerCard], Awaitable[ModelInfo]], secret: bytes) -> None:
        self._fetch = fetch
        self._secret = secret
        self._encoders: OrderedDict[str, Encoder] = OrderedDict()
        self._fetching: dict[str, asyncio.Lock] = {}
        self._roots: dict[tuple[Namespace, str], bytes] = {}
        self._segments = SegmentTree()
        self._recent: OrderedDict[tuple[bytes, bool, str], Prompt] = OrderedDict()
        self._recent_characters = 0
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenization")

    def close(self) -> None:
        """End the threads."""
        self._closing.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def known_encoder(self, namespace: Namespace) -> Encoder | None:
        """The encoder for workers of this namespace, where it was fetched already."""
        encoder = self._encoders.get(namespace.tokenizer)
        if encoder is not None:
            self._encoders.move_to_end(namespace.tokenizer)
        return encoder

    async def encoder(self, cards: Sequence[WorkerCard]) -> Encoder:
        """The encoder for workers that share one namespace.

        Asks one worker after the other. Raises RequestError (503) where none answers with the
        model that its card names.
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

    async def prompt(self, request: ApiRequest, encoder: Encoder, namespace: Namespace) -> Prompt:
        """Tokens and hashes of a request. Raises RequestError (400)."""
        root = self._root(namespace, request.cache_salt)
        if request.token_ids is not None:
            ids = _checked(request.token_ids, encoder)
            return await self._run(
                len(ids) * 4, lambda: self._hash(pack_tokens(ids), root, namespace)
            )
        chat = request.text is None
        names = encoder.names(request)
        if names:
            found = self._segments.find(_beginning(namespace, root, "messages"), root, names)
            try:
                missing = encoder.segments(request.messages or [], len(found.path) - 1)
            except NotByMessage:
                pass
            else:
                return await self._continued(found, missing, encoder, namespace, bos=False)
        text = encoder.render(request) if request.text is None else request.text
        segments = encoder.cut(text)
        if len(segments) > 1:
            beginning = _beginning(namespace, root, "chat" if chat else "text")
            found = self._segments.find(beginning, root, segments)
            missing = segments[len(found.path) - 1 :]
            return await self._continued(found, missing, encoder, namespace, bos=not chat)
        key = (root, chat, text)
        known = self._recent.get(key)
        if known is not None:
            self._recent.move_to_end(key)
            return known
        prompt = await self._run(
            len(text),
            lambda: self._hash(encoder.encode(text, bos=not chat), root, namespace),
        )
        if not prompt.tokens:
            raise _no_tokens()
        self._remember(key, prompt)
        return prompt

    def _root(self, namespace: Namespace, tenant: str) -> bytes:
        key = (namespace, tenant)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= KEPT_ROOTS:
                self._roots.clear()
            root = self._roots[key] = namespace.for_request(tenant=tenant).root(self._secret)
        return root

    async def _continued(
        self,
        found: Found,
        missing: list[str],
        encoder: Encoder,
        namespace: Namespace,
        *,
        bos: bool,
    ) -> Prompt:
        """The prompt of a text in segments, of which only those never seen are computed."""
        computed = await self._run(
            sum(map(len, missing)),
            lambda: compute(
                found.path[-1],
                missing,
                lambda segment, first: encoder.encode(segment, bos=first and bos),
                namespace.block_size,
                begins=len(found.path) == 1,
            ),
        )
        path = self._segments.add(found, computed)
        packed = b"".join([node.packed for node in path])
        if not packed:
            raise _no_tokens()
        return Prompt(packed, list(chain.from_iterable([node.hashes for node in path])), namespace)

    def _hash(self, packed: bytes, root: bytes, namespace: Namespace) -> Prompt:
        return Prompt(packed, hash_blocks(root, packed, namespace.block_size), namespace)

    async def _run(self, characters: int, work: Callable[[], _Result]) -> _Result:
        if characters <= THREAD_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _remember(self, key: tuple[bytes, bool, str], prompt: Prompt) -> None:
        if key in self._recent or len(key[2]) > CACHE_CHARACTERS // 4:
            return
        self._recent[key] = prompt
        self._recent_characters += len(key[2])
        while self._recent_characters > CACHE_CHARACTERS:
            (_, _, text), _ = self._recent.popitem(last=False)
            self._recent_characters -= len(text)

    async def _fetch_any(self, cards: Sequence[WorkerCard]) -> Encoder:
        reasons = []
        for card in cards:
            try:
                info = await self._fetch(card)
                if info.namespace != card.namespace:
                    raise ValueError("it serves another model than its card says")
                encoder = await asyncio.get_running_loop().run_in_executor(
                    self._threads, Encoder, info
                )
            except Exception as error:  # tokenizers raises plain Exception
                reasons.append(f"{card.worker}: {error or type(error).__name__}")
            else:
                self._threads.submit(encoder.learn_words, self._closing.is_set)
                return encoder
        raise RequestError(
            "the tokenizer of the model cannot be had from any worker: " + "; ".join(reasons),
            status=503,
            type=SERVICE_UNAVAILABLE,
            code="no_tokenizer",
        )


@lru_cache(maxsize=KEPT_ROOTS)
def _beginning(namespace: Namespace, root: bytes, kind: str) -> str:
    return f"{namespace.tokenizer} {namespace.block_size} {root.hex()} {kind}"


def _no_tokens() -> RequestError:
    return RequestError("the prompt has no tokens: send some text", param="prompt")


def _checked(ids: list[int], encoder: Encoder) -> list[int]:
    for token in (min(ids), max(ids)):
        if not 0 <= token < encoder.vocabulary:
            raise RequestError(
                f"`prompt` holds the token id {token}: the model's ids go from 0 to "
                f"{encoder.vocabulary - 1}",
                param="prompt",
            )
    return ids
