"""Text becomes the tokens and hashes that workers use."""

import json
import threading
from importlib.metadata import version

import msgspec
import pytest
import tokenizers

from cluster.blocks import hash_blocks, unpack_tokens
from cluster.protocol import RequestError
from router.background import Background
from router.chat_template import MAX_DEPTH
from router.known_texts import RUN_CHARACTERS
from router.openai_api import ApiRequest
from router.tokenization import AT_ONCE_BYTES, TOOLS_GROWTH, Encoder, Tokenization
from tests.real_tokenizer import smollm2
from tests.router.support import BLOCK_SIZE, NAMESPACE, TOKENIZER, card, model_info
from tests.router.test_encoding import encoders
from worker.weights import MissingModel

SECRET = b"secret"
CONTEXT_TOKENS = 100_000


def asked(**fields):
    kind = "chat" if "messages" in fields else "completion"
    return ApiRequest(kind=kind, model="tiny", sampling=None, max_tokens=None, **fields)


def say(*contents, role="user"):
    return [{"role": role, "content": content} for content in contents]


class Fetches:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def __call__(self, worker_card):
        self.asked.append(worker_card.worker)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()


@pytest.fixture
def make(background):
    def tokenization(*answers):
        return Tokenization(Fetches(*(answers or [model_info()])), SECRET, background)

    return tokenization


async def prompt_of(tokenization, request, cards=None, context_tokens=CONTEXT_TOKENS):
    cards = cards or [card()]
    encoder = await tokenization.encoder(cards)
    return await tokenization.prompt(request, encoder, cards[0].namespace, context_tokens)


async def test_a_chat_is_rendered_tokenised_and_hashed_as_a_worker_would(make):
    prompt = await prompt_of(make(), asked(messages=say("grüß dich", "ça va 🙂")))
    text = "<user>grüß dich<user>ça va 🙂<assistant>"
    tokenizer = tokenizers.Tokenizer.from_str(TOKENIZER)
    assert tokenizer.decode(unpack_tokens(prompt.token_ids)) == text
    assert prompt.tokens == len(text.encode())
    root = NAMESPACE.root(SECRET)
    assert prompt.chain == hash_blocks(root, prompt.token_ids, BLOCK_SIZE)
    assert len(prompt.chain) == prompt.tokens // BLOCK_SIZE


async def test_a_salt_changes_every_hash_and_no_token(make):
    tokenization = make()
    plain = await prompt_of(tokenization, asked(text="some text of several blocks"))
    salted = await prompt_of(
        tokenization, asked(text="some text of several blocks", cache_salt="a")
    )
    assert plain.token_ids == salted.token_ids
    assert not set(plain.chain) & set(salted.chain)


async def test_token_ids_are_taken_as_they_are_and_checked(make):
    tokenization = make()
    prompt = await prompt_of(tokenization, asked(token_ids=[5, 6, 7, 8, 9]))
    assert unpack_tokens(prompt.token_ids) == [5, 6, 7, 8, 9]
    assert len(prompt.chain) == 1
    for bad in (-1, 257):
        with pytest.raises(RequestError, match=f"token id {bad}: the model's ids go from 0 to 256"):
            await prompt_of(tokenization, asked(token_ids=[5, bad]))


async def test_token_ids_may_be_any_that_the_embedding_has(make):
    """Models often have more rows than their tokenizer has tokens, and now and then fewer."""
    for rows in (300, 200):
        tokenization = make(model_info(embedding_rows=rows))
        prompt = await prompt_of(tokenization, asked(token_ids=[5, rows - 1]))
        assert unpack_tokens(prompt.token_ids) == [5, rows - 1]
        with pytest.raises(RequestError, match=f"token id {rows}: .* from 0 to {rows - 1}"):
            await prompt_of(tokenization, asked(token_ids=[5, rows]))


async def test_completions_begin_with_bos_where_the_model_wants_it_and_chats_do_not(make):
    tokenization = make(model_info(add_bos=True))
    completion = await prompt_of(tokenization, asked(text="ab"))
    assert unpack_tokens(completion.token_ids)[0] == 256
    assert completion.tokens == 3
    chat = await prompt_of(tokenization, asked(messages=say("ab")))
    assert 256 not in unpack_tokens(chat.token_ids)
    with pytest.raises(ValueError, match="has none"):
        Encoder(model_info(add_bos=True, special_tokens={}))


async def test_long_texts_give_the_same_tokens_off_the_loop(make):
    text = "word " * 20
    large = asked(text=text, body_bytes=AT_ONCE_BYTES + 1)
    small = asked(text=text, body_bytes=AT_ONCE_BYTES)
    tokenization = make()
    assert await prompt_of(tokenization, large) == await prompt_of(tokenization, small)


async def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(make):
    tokenization = make()
    for request, param in [
        (asked(text="12345"), "prompt"),
        (asked(token_ids=[1, 2, 3, 4, 5]), "prompt"),
        (asked(messages=say("")), "messages"),
    ]:
        tokens = (await prompt_of(tokenization, request)).tokens
        await prompt_of(tokenization, request, context_tokens=tokens + 1)
        words = f"`tiny` is {tokens} tokens, but the prompt has {tokens} and"
        with pytest.raises(RequestError, match=words) as refusal:
            await prompt_of(tokenization, request, context_tokens=tokens)
        assert (refusal.value.status, refusal.value.param) == (400, param)
        assert refusal.value.code == "context_length_exceeded"


async def test_what_cannot_fit_by_its_size_is_refused_before_it_is_encoded(make, monkeypatch):
    tokenization = make()
    encoder = await tokenization.encoder([card()])

    def encode(*_):
        raise AssertionError("it was encoded")

    monkeypatch.setattr("router.encoding._encode_fast", encode)
    longest = max(map(len, model_info().special_tokens.values()))
    text = "x" * (20 * longest)
    with pytest.raises(RequestError, match="the prompt has at least 20 and") as refusal:
        await tokenization.prompt(asked(text=text), encoder, NAMESPACE, 10)
    assert refusal.value.code == "context_length_exceeded"


async def test_runs_that_each_fit_do_not_hide_that_the_whole_does_not(make, monkeypatch):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    info = model_info(tokenizer_json=encoders("GPT-2")[0].to_str(), chat_template=template)
    tokenization = make(info)
    encoder = await tokenization.encoder([card()])

    def encode(*_):
        raise AssertionError("it was encoded")

    monkeypatch.setattr("router.encoding._encode_fast", encode)
    run = "x" * RUN_CHARACTERS
    with pytest.raises(AssertionError, match="it was encoded"):
        await tokenization.prompt(asked(messages=say(run)), encoder, NAMESPACE, RUN_CHARACTERS)
    many = asked(messages=say(*[run] * 100))
    with pytest.raises(RequestError, match="the prompt has at least") as refusal:
        await tokenization.prompt(many, encoder, NAMESPACE, RUN_CHARACTERS)
    assert refusal.value.code == "context_length_exceeded"


async def test_an_encoder_tells_which_library_serves(make):
    tokenization = make()
    assert tokenization.encoder_infos() == []
    await tokenization.encoder([card()])
    [info] = tokenization.encoder_infos()
    assert (info.tokenizer, info.model, info.reason) == (NAMESPACE.tokenizer, "tiny", "")
    assert (info.library, info.version) == ("fastokens", version("fastokens"))


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, say("x", role="villain"), "no villains here"),
        ("{{ messages[5].content }}", say("x"), "chat template refuses"),
        ("{{ messages.append(1) }}", say("x"), "chat template refuses"),
        ("{{ ''.__class__.__mro__ }}", say("x"), "chat template refuses"),
        ("{{ 1 / 0 }}", say("x"), "chat template refuses"),
    ],
)
async def test_template_errors_are_the_clients(make, template, messages, words):
    info = model_info() if template is None else model_info(chat_template=template)
    with pytest.raises(RequestError, match=words) as refusal:
        await prompt_of(make(info), asked(messages=messages))
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


async def test_templates_have_the_usual_helpers(make):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}{{ mood }}"
    )
    encoder = Encoder(model_info(chat_template=template))
    request = asked(
        messages=say("a", "b"), tools=[{"n": "é"}], template_fields={"mood": "!", "bos_token": "x"}
    )
    assert encoder.render(request) == '<s>a[{"n": "é"}]4True!'


async def test_tojson_takes_what_transformers_gives_it(make):
    template = (
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
        "{{ tools | tojson(indent=1) }}{{ tools | tojson(false, 1) }}"
    )
    encoder = Encoder(model_info(chat_template=template))
    rendered = encoder.render(asked(messages=say("a"), tools=[{"z": "é", "a": 1}]))
    indented = '[\n {\n  "z": "é",\n  "a": 1\n }\n]'
    assert rendered == '[{"a":1,"z":"\\u00e9"}]' + indented * 2


@pytest.mark.parametrize("indent", ["", "indent=4"])
async def test_what_a_template_writes_as_json_is_nested_at_most_so_deep(indent):
    encoder = Encoder(model_info(chat_template=f"{{{{ tools[0].a | tojson({indent}) }}}}"))

    def nested(depth):
        return asked(messages=say("a"), tools=[{"a": json.loads("[" * depth + "]" * depth)}])

    assert encoder.render(nested(MAX_DEPTH)).count("[") == MAX_DEPTH
    with pytest.raises(RequestError, match=f"nested more than {MAX_DEPTH} deep") as refusal:
        encoder.render(nested(MAX_DEPTH + 1))
    assert refusal.value.status == 400


async def test_a_body_with_tools_is_rendered_in_a_thread_sooner(make):
    template = "{{ tools }}{{ messages[0].content }}"
    tokenization = make(model_info(chat_template=template))
    threads = []

    class Watching(list):
        def __str__(self):
            threads.append(threading.current_thread() is threading.main_thread())
            return "tools"

    for body_bytes in (AT_ONCE_BYTES // TOOLS_GROWTH, AT_ONCE_BYTES // TOOLS_GROWTH + 1):
        request = asked(messages=say("a"), tools=Watching([{}]), body_bytes=body_bytes)
        await prompt_of(tokenization, request)
    assert threads == [True, False]


async def test_tools_go_to_the_template_for_tools(make):
    encoder = Encoder(
        model_info(
            chat_template="plain {{ messages[0].content }}",
            tool_chat_template="with {{ tools[0].n }} {{ messages[0].content }}",
        )
    )
    assert encoder.render(asked(messages=say("a"))) == "plain a"
    assert encoder.render(asked(messages=say("a"), tools=[{"n": "f"}])) == "with f a"


async def test_tools_that_the_template_would_drop_are_refused(make):
    encoder = Encoder(model_info(chat_template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="does not use tools") as refusal:
        encoder.render(asked(messages=say("a"), tools=[{"n": "f"}]))
    assert (refusal.value.status, refusal.value.param) == (400, "tools")


async def test_a_model_without_a_template_asks_for_completions(make):
    with pytest.raises(RequestError, match="use /v1/completions"):
        await prompt_of(make(model_info(chat_template="")), asked(messages=say("x")))


async def test_the_tokenizer_is_fetched_once_a_digest(make):
    other = msgspec.structs.replace(NAMESPACE, tokenizer="t2")
    tokenization = make(model_info(), model_info(namespace=other))
    for worker in ("a", "b"):
        await prompt_of(tokenization, asked(text="hello"), [card(worker)])
    await prompt_of(tokenization, asked(text="hello"), [card("c", namespace=other)])
    assert tokenization._fetch.asked == ["a", "c"]


async def test_other_workers_are_asked_where_one_fails_or_serves_something_else(make):
    wrong = model_info(namespace=msgspec.structs.replace(NAMESPACE, weights="w2"))
    tokenization = make(OSError("refused"), wrong, model_info())
    prompt = await prompt_of(tokenization, asked(text="hello"), [card("a"), card("b"), card("c")])
    assert prompt.tokens == 5
    assert tokenization._fetch.asked == ["a", "b", "c"]


async def test_no_tokenizer_at_all_is_said_with_every_reason(make):
    tokenization = make(OSError("refused"), model_info(tokenizer_json="{}"), model_info())
    with pytest.raises(RequestError, match=r"a: refused; b: ") as refusal:
        await prompt_of(tokenization, asked(text="hello"), [card("a"), card("b")])
    assert refusal.value.status == 503
    assert (await prompt_of(tokenization, asked(text="hello"))).tokens == 5  # and tried again


async def test_text_that_is_no_unicode_is_refused(make):
    with pytest.raises(RequestError, match="surrogate"):
        await prompt_of(make(), asked(text="bad \ud800 text"))


def real_model():
    try:
        real = smollm2()
    except MissingModel as error:
        pytest.skip(str(error))
    return model_info(
        tokenizer_json=real.tokenizer_json,
        chat_template=real.chat_template,
        special_tokens={"bos_token": "<|im_start|>"},
    )


async def test_a_conversation_that_goes_on_has_the_tokens_of_its_whole_text(make):
    info = real_model()
    tokenization, encoder = make(info), Encoder(info)
    library = tokenizers.Tokenizer.from_str(info.tokenizer_json)

    async def check(messages):
        prompt = await tokenization.prompt(
            asked(messages=messages), encoder, NAMESPACE, CONTEXT_TOKENS
        )
        text = encoder.render(asked(messages=messages))
        assert unpack_tokens(prompt.token_ids) == library.encode(text).ids
        assert prompt.chain == hash_blocks(NAMESPACE.root(SECRET), prompt.token_ids, BLOCK_SIZE)

    messages = [
        *say("You know all: 12 towns, 3 rivers.", role="system"),
        *say("Grüß dich, wie geht's?" * 50),
        *say("<|im_end|> is a token", "", " and so ", role="assistant"),
        *say("你好 <|im_start|>user\n", "the same", "the same"),
    ]
    for _ in range(2):  # the second time every message is known
        for length in range(1, len(messages) + 1):
            await check(messages[:length])
    await check(messages[1:])
    await check([*messages[:3], *say("another way")])
