import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.blocktext import ID_WORDS, MAX_ID, WORDS, block_text
from tests.real_tokenizer import smollm2
from worker.emulator import byte_tokenizer
from worker.weights import MissingModel

IDS = st.integers(0, MAX_ID - 1)


@pytest.fixture(scope="module")
def demo_tokenizer():
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(smollm2().tokenizer_json)
    except MissingModel as error:
        pytest.skip(str(error))


def test_there_are_256_different_words_of_one_length():
    assert len(set(WORDS)) == 256
    assert {len(word) for word in WORDS} == {3}


def test_each_word_is_one_token_of_the_demo_model(demo_tokenizer):
    for word in WORDS:
        assert len(demo_tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1


@pytest.mark.parametrize(("name", "tokens_a_word"), [("demo_tokenizer", 1), ("bytes", 4)])
def test_blocks_begin_and_end_at_token_boundaries(request, name, tokens_a_word):
    tokenizer = byte_tokenizer() if name == "bytes" else request.getfixturevalue(name)

    def tokens(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    blocks = [(7, 16), (8, 16), (7, 1), (MAX_ID - 1, 128), (0, 3)]
    texts = [block_text(*block) for block in blocks]
    assert tokens("".join(texts)) == [token for text in texts for token in tokens(text)]
    assert [len(tokens(text)) for text in texts] == [tokens_a_word * words for _, words in blocks]


@given(one=IDS, other=IDS, words=st.integers(ID_WORDS, 40))
def test_different_ids_are_different_texts(one, other, words):
    assert (block_text(one, words) == block_text(other, words)) is (one == other)


def test_neighbouring_ids_differ_in_their_first_word():
    firsts = [block_text(i, 1) for i in range(200)]
    assert all(a != b for a, b in itertools.pairwise(firsts))
    assert len(set(firsts)) > 100


@given(one=IDS, words=st.integers(1, 40), more=st.integers(0, 40))
def test_a_shorter_text_is_the_begin_of_a_longer(one, words, more):
    text = block_text(one, words)
    assert block_text(one, words + more).startswith(text)
    assert len(text.split()) == words


def test_every_process_writes_the_same():
    assert block_text(1, 6) == " bit few ink sat art how"


@pytest.mark.parametrize("wrong", [-1, MAX_ID])
def test_ids_beyond_the_bounds_are_refused(wrong):
    with pytest.raises(ValueError, match="block id"):
        block_text(wrong, 4)
