"""Text becomes the tokens and hashes that workers use."""

import msgspec
import pytest
import tokenizers

from cluster.blocks import hash_blocks, unpack_tokens
from cluster.protocol import RequestError
from router.chat_template import ChatTemplate
from router.openai_api import ApiRequest
from router.tokenization import THREAD_CHARACTERS, Encoder, Tokenization
from tests.real_tokenizer import smollm2
from tests.router.support import BLOCK_SIZE, NAMESPACE, TOKENIZER, card, model_info
from worker.weights import MissingModel

SECRET = b"secret"


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
def make():
    made = []

    def tokenization(*answers):
        made.append(Tokenization(Fetches(*(answers or [model_info()])), SECRET))
        return made[-1]

    yield tokenization
    for tokenization in made:
        tokenization.close()


async def prompt_of(tokenization, request, cards=None):
    cards = cards or [card()]
    encoder = await tokenization.encoder(cards)
    return await tokenization.prompt(request, encoder, cards[0].namespace)


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
    tokenization = make()
    text = "word " * (THREAD_CHARACTERS // 4)
    prompt = await prompt_of(tokenization, asked(text=text))
    assert prompt.tokens == len(text)
    assert await prompt_of(tokenization, asked(text=text)) is prompt  # not tokenised twice


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


async def test_the_memory_of_recent_prompts_is_bounded(make, monkeypatch):
    monkeypatch.setattr("router.tokenization.CACHE_CHARACTERS", 40)
    tokenization = make()
    kept = [await prompt_of(tokenization, asked(text=f"text {n:04}")) for n in range(6)]
    assert sum(len(text) for _, _, text in tokenization._recent) <= 40
    assert await prompt_of(tokenization, asked(text="text 0005")) is kept[5]
    assert await prompt_of(tokenization, asked(text="text 0000")) is not kept[0]


async def test_text_that_is_no_unicode_is_refused(make):
    with pytest.raises(RequestError, match="surrogate"):
        await prompt_of(make(), asked(text="bad \ud800 text"))


class Conversations:
    """Prompts of real text by a real model's tokenizer and template, or by another template."""

    def __init__(self, make, template=""):
        try:
            real = smollm2()
        except MissingModel as error:
            pytest.skip(str(error))
        info = model_info(
            tokenizer_json=real.tokenizer_json,
            chat_template=template or real.chat_template,
            special_tokens={"bos_token": "<|im_start|>"},
        )
        self.encoder = Encoder(info)
        self._tokenizer = tokenizers.Tokenizer.from_str(real.tokenizer_json)
        self._tokenization = make(info)

    async def check(self, messages):
        request = asked(messages=messages)
        prompt = await self._tokenization.prompt(request, self.encoder, NAMESPACE)
        whole = self._tokenizer.encode(self.encoder.render(request), add_special_tokens=False)
        assert unpack_tokens(prompt.token_ids) == whole.ids
        assert prompt.chain == hash_blocks(NAMESPACE.root(SECRET), prompt.token_ids, BLOCK_SIZE)


NO_BOUNDARY = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
LOOKS_AHEAD = (
    "{% for m in messages %}<|im_start|>{{ m.content }}{% if loop.last %} !{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", ["", NO_BOUNDARY, LOOKS_AHEAD])
async def test_a_conversation_that_goes_on_has_the_tokens_of_its_whole_text(make, template):
    conversations = Conversations(make, template)
    messages = [
        *say("You know all: 12 towns, 3 rivers.", role="system"),
        *say("Grüß dich, wie geht's?"),
        *say("<|im_end|> is a token", "", " and so ", role="assistant"),
        *say("你好 <|im_start|>user\n", "the same", "the same"),
    ]
    for _ in range(2):  # the second time every message is known
        for length in range(1, len(messages) + 1):
            await conversations.check(messages[:length])
    await conversations.check(messages[1:])
    await conversations.check([*messages[:3], *say("another way")])


async def test_what_is_known_of_a_conversation_is_not_rendered_again(make, monkeypatch):
    conversations = Conversations(make)
    messages = say("one", "two", "three")
    await conversations.check(messages[:2])
    rendered = []
    part = ChatTemplate.part

    def noting(self, messages, place):
        rendered.append(place)
        return part(self, messages, place)

    monkeypatch.setattr(ChatTemplate, "part", noting)
    await conversations.check(messages)
    assert rendered == [2]


async def test_many_new_messages_are_rendered_at_once(make, monkeypatch):
    def part(self, messages, place):
        raise AssertionError("one by one takes many times as long, in which all streams wait")

    monkeypatch.setattr(ChatTemplate, "part", part)
    await Conversations(make).check(say(*map(str, range(1000))))


async def test_messages_with_more_than_a_text_are_rendered_whole(make):
    conversations = Conversations(make)
    await conversations.check([{"role": "user", "content": "x", "name": "Ada"}])
    request = asked(messages=say("x"), template_fields={"a": 1})
    assert conversations.encoder.names(request) == []
    assert conversations.encoder.names(asked(messages=say("x"), tools=[{}])) == []
