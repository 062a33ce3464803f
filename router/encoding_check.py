"""Texts on which two implementations of a tokenizer must agree before one replaces the other."""

from __future__ import annotations

from collections.abc import Iterable

TEXTS = (
    "",
    "The router sends every request to the worker that holds its prefix.",
    "I'm sure they'll say it's theirs; WE'VE DONE IT, I'D SAY. don't 'quote' ''",
    "camelCase snake_case SCREAMING_CASE kebab-case a.b.c a/b\\c x->y Foo::bar user@example.com",
    "def f(x: int) -> str:\n\tif x > 9:\n\t\treturn f'{x:>8}'\n\n\n    return \"\\n\"  # done\r\n",
    '{"a": [1, 2.5, -3e10, null], "b": {"c": "d\\u00e9"}}\n<div class="x">&amp;</div>',
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 10e-7 1st v2.0.1 ½ ² Ⅷ ٣٤ १२",
    "a  b   c    d\te\t\tf\n\ng\n\n\nh\r\ni\rj \n k\n l\t\n",
    "  leading and trailing  ",
    " ",
    "\n",
    "\t \n \r\n",
    " " * 100 + "x" + "\n" * 70 + "y" + "\t" * 40,
    "\u00a0nbsp\u2003em\u2009thin\u3000wide\u200bzero\ufeffbom\u2028line\u2029par\x85nel\x0b\x0c",
    "nul\x00 and \x01\x02\x1f\x7f control",
    "Grüße aus Köln, naïve café, Ærøskøbing, İstanbul ıI ſß ŐŰ ﬁ ﬀ",
    "e\u0301 o\u0308 n\u0303 a\u030a\u0323 \u1f82 α\u0313\u0342\u0345 q\u0307\u0323 "
    "\u0300start Z\u0351\u036b\u0343a\u0304l\u0321\u0353g\u0349o\u0321",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก ជំរាប",
    "你好，世界。日本語のテキスト、ひらがなとカタカナ。한국어 텍스트 \u1112\u1161\u11ab 𠮷野家 龘",
    "👍🏽 😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ ☃ ✂️ a😀b 🙂.🙂!",
    "∑∫√∞ ≠≤≥ ←→ €£¥₿ ©®™ …—–-‐ “quoted” ‘single’ «guillemets» ¿qué? ¡sí!",
    "A\u180eA \u180e!\u180e 1\u180e\u180e A\U00011de1A \U00011de1!\U00011de1  \U00016ff4a",
    "\ue000\uf8ff\U000f0000 \ufffd\ufffe\uffff \U0010ffff \u0378",
    "!!! ??? ... --- === *** ### $$$ %%% ((())) [[]] {{}} <<>> ~~~ ``` |||",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Donaudampfschifffahrtsgesellschaftskapitän pneumonoultramicroscopicsilicovolcanoconiosis",
    "<0x0A> <s> </s> <unk> <|endoftext|> <|im_start|> ▁ ▁▁a Ġ Ċ <| |> [INST] <bos>",
    "https://example.com/a/b?c=d&e=%20f#g C:\\path\\to\\file.txt ~/.config/x.toml",
    "SELECT * FROM t WHERE a='b' AND c IS NOT NULL; -- comment\n/* x */ x++; y--; z**=2; a<<=1;",
)
"""Words, code, digits, white space of all kinds, emoji, many scripts, combining marks, private and
unassigned characters, what regular expressions take for white space or for digits only in some
libraries, and texts that resemble added tokens."""


def check_texts(added_tokens: Iterable[str]) -> list[str]:
    """`TEXTS`, and every added token alone, in words, doubled, in white space, cut and cased."""
    texts = list(TEXTS)
    previous = ""
    for token in added_tokens:
        texts.append(
            f"{token}{token} a{token}b {token} c\n{token}\n {token}\t.{token}é{token[:-1]} "
            f"{token[1:]} {token.upper()}{previous}{token}  {token}1"
        )
        texts.append(token)
        previous = token
    texts.append("\n\n".join(TEXTS))
    return texts
