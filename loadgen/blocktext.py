"""Text made from block ids: equal ids give equal tokens, different ids different ones, where a
block has at least four words (`ID_WORDS`); `loadgen.bodies.Writer.confusion` counts what fewer do.

A text is words of three letters, each with a space before it. Tokenizers split before such a
space and hold words this common as one token each, so a block's text begins and ends where
tokens do whatever stands beside it: the tokens of joined blocks are the joined tokens of the
blocks. With a vocabulary of single bytes a word is four tokens, and the same holds.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_WORD_LIST = """
    the and for you are can was who how our may use new any add get two set see way art own car
    min sun day now too lit led her act all out off but not has had his him she let yes yet why
    low key run old try air bus law top few due fit far age war gas oil box sea red hot dry wet
    cut put big lot man men boy kid son mom dad god cat dog cow pig bee ant fly owl fox hen egg
    pie tea ice jam nut fig pea bun rye ham leg arm eye ear lip toe hip bed cup pan pot jar bag
    hat cap tie tap map pen ink pad log bar rod net web van jet row sky ray fog mud bay gem bow
    bat rat toy fun joy win won pay job fee tax buy sum ten six one per via end mid bit raw mix
    fix dig hit sit cry lie die ran saw ate met fed hid say ask eat sat dim shy sad mad odd apt
    bad ill rep pop par pal ban era gap tip tub rub oak gym bug zip sew vow arc wax bin tab pin
    pit rib ash bud soy nod jaw fan cab kit rid fur aid ago aim lab mob hub pod cub ton dot wit
    lap lid guy ads bid pet hay dye ore mat tan gum lag dip rip rig pub hop vet ram bet fin gel
    kin lad orb
"""
WORDS = tuple(_WORD_LIST.split())
"""256 common words: one byte names one word."""

WORD_CHARACTERS = 4
ID_WORDS = 4
"""So many first words tell an id apart from every other."""

MAX_ID = 1 << (8 * ID_WORDS)
_SPREAD = 0x9E3779B1
"""Odd, so that multiplying by it permutes the ids; neighbours then differ in their first word."""


def block_text(block_id: int, words: int) -> str:
    """The first `words` words of the block's text; fewer words are a prefix of more.

    Ids below `MAX_ID` differ within their first `ID_WORDS` words; shorter texts of different ids
    may be equal. Raises ValueError for another id.
    """
    if not 0 <= block_id < MAX_ID:
        raise ValueError(f"a block id lies between 0 and {MAX_ID - 1}, got {block_id}")
    return _text(block_id, words)


@lru_cache(maxsize=1 << 16)
def _text(block_id: int, words: int) -> str:
    head = (block_id * _SPREAD % MAX_ID).to_bytes(ID_WORDS, "big")
    tail = hashlib.shake_128(head).digest(max(0, words - ID_WORDS))
    return "".join(f" {WORDS[byte]}" for byte in (head + tail)[:words])
