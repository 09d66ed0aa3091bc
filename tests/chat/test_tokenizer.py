"""Text to ids and back: pieces, slices, specials, decoding, files that are wrong."""

from __future__ import annotations

import base64
import time
import unicodedata
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.chat import Segment, Tokenizer
from longspan.chat.tokenizer import MAX_RUN, MAX_SLICE, slices
from longspan.errors import CheckpointError, RequestError

# --- an independent reading of the specification, one character at a time ----------------------


def is_han(c: str) -> bool:
    return regex.match(r"\p{Han}", c) is not None


def is_space(c: str) -> bool:
    return regex.match(r"\p{White_Space}", c) is not None


def is_letter(c: str) -> bool:
    return unicodedata.category(c)[0] == "L"


def is_number(c: str) -> bool:
    return unicodedata.category(c)[0] == "N"


def is_upper_like(c: str) -> bool:
    category = unicodedata.category(c)
    return (category in ("Lu", "Lt", "Lm", "Lo") or category[0] == "M") and not is_han(c)


def is_lower_like(c: str) -> bool:
    category = unicodedata.category(c)
    return (category in ("Ll", "Lm", "Lo") or category[0] == "M") and not is_han(c)


def is_symbol(c: str) -> bool:
    return not (is_space(c) or is_letter(c) or is_number(c))


def run(text: str, start: int, test, limit: int | None = None) -> int:
    """Where the longest run of characters that pass `test` ends."""
    end = start
    while end < len(text) and test(text[end]) and (limit is None or end - start < limit):
        end += 1
    return end


def contraction(text: str, start: int) -> int:
    for tail in ("s", "t", "re", "ve", "m", "ll", "d"):
        if regex.match("'" + tail, text[start:], regex.IGNORECASE):
            return start + 1 + len(tail)
    return start


def word(text: str, start: int, *, lower_needed: bool) -> int | None:
    """Alternatives 2 and 3: every way to divide the word in two halves, the longest first half first."""
    lead = text[start : start + 1]
    begins = [start]
    if lead and lead not in "\r\n" and not is_letter(lead) and not is_number(lead):
        begins = [start + 1, start]
    for begin in begins:
        for middle in range(run(text, begin, is_upper_like), begin - 1, -1):
            end = run(text, middle, is_lower_like)
            if (end > middle) if lower_needed else (middle > begin):
                return contraction(text, end)
    return None


def spaces_before_a_word_stay_apart(text: str, start: int) -> int | None:
    end = run(text, start, is_space)
    if end == len(text):
        return end if end > start else None
    return end - 1 if end - 1 > start else None


def next_piece(text: str, start: int) -> int:
    """End of the piece that begins at `start`: the eight alternatives in order."""
    if (end := run(text, start, is_han)) > start:
        return end
    for lower_needed in (True, False):
        if (end := word(text, start, lower_needed=lower_needed)) is not None:
            return end
    if (end := run(text, start, is_number, limit=3)) > start:
        return end
    begin = start + 1 if text[start] == " " else start
    if (end := run(text, begin, is_symbol)) > begin:
        return run(text, end, lambda c: c in "\r\n")
    spaces = run(text, start, is_space)
    for end in range(spaces, start, -1):
        if text[end - 1] in "\r\n":
            return end
    if (end := spaces_before_a_word_stay_apart(text, start)) is not None:
        return end
    return spaces


def pieces(text: str) -> list[str]:
    cut = []
    start = 0
    while start < len(text):
        end = next_piece(text, start)
        assert end > start, f"no alternative matches {text[start:]!r}"
        cut.append(text[start:end])
        start = end
    return cut


def merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte pair encoding as one would explain it: always the pair of lowest rank, the leftmost first."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
        rank, i = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return [ranks[part] for part in parts]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def reference(text: str, ranks: dict[bytes, int]) -> list[int]:
    return [token_id for piece in pieces(text) for token_id in merge(piece.encode(), ranks)]


# Blocks that hold every class of character that the pattern tells apart, long assigned in Unicode.
ALPHABET = st.one_of(
    st.sampled_from(" \t\n\r'\"sStTrReEvVmMlLdD.,!?-_<|>0123456789"),
    st.sampled_from(
        "aZéÀßǅʰʼªºﬁ你好世界々〇〡あア한글กำا\u0301\u0903\u20dd½Ⅷ٣²\u00a0\u2003\u2028\u0085\u3000€😀👩\u200d\ufeff"
    ),
    st.characters(max_codepoint=0x33FF, categories=("L", "M", "N", "P", "S", "Z")),
)


def known_for_long(c: str) -> bool:
    """Assigned in an old version of Unicode, so that all libraries agree on what the character is."""
    return unicodedata.ucd_3_2_0.category(c) == unicodedata.category(c) != "Cn"


TEXT = st.text(ALPHABET.filter(known_for_long), max_size=60)

# --- encoding ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_ranks() -> dict[bytes, int]:
    """Every pair of bytes is a token, letters first, so a cut in the wrong place shows in the ids."""
    singles = [bytes([byte]) for byte in range(256)]
    tokens = singles + [a + b for a in reversed(singles) for b in reversed(singles)]
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def pair_tokenizer(pair_ranks) -> Tokenizer:
    return Tokenizer(pair_ranks, {})


@given(TEXT)
@settings(max_examples=400, deadline=None)
def test_ids_equal_those_of_a_slow_independent_encoder(tokenizer, ranks, pair_tokenizer, pair_ranks, text):
    assert tokenizer.encode(text) == reference(text, ranks)
    assert pair_tokenizer.encode(text) == reference(text, pair_ranks)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("Hello world", ["Hello", " world"]),
        ("你好世界abc", ["你好世界", "abc"]),
        ("CamelCase HTTPServer", ["Camel", "Case", " HTTPServer"]),
        ("it's WE'LL o'clock", ["it's", " WE'LL", " o", "'clock"]),
        ("I'd you're I'M I've don't", ["I'd", " you're", " I'M", " I've", " don't"]),
        ("ʰAb ʰA", ["ʰAb", " ʰ", "A"]),
        ("1234567", ["123", "456", "7"]),
        ("a  b\n\n  c ", ["a", " ", " b", "\n\n", " ", " c", " "]),
        ("x += 1;\n", ["x", " +=", " ", "1", ";\n"]),
    ],
)
def test_pieces_are_cut_where_the_rules_say(pair_tokenizer, pair_ranks, text, cut):
    assert pieces(text) == cut
    assert pair_tokenizer.encode(text) == [i for piece in cut for i in merge(piece.encode(), pair_ranks)]


@pytest.mark.parametrize(
    "text", ["a" * 3000, "世界你好" * 500, base64.b64encode(bytes(range(256)) * 4).decode()]
)
def test_long_pieces_have_the_ids_of_the_slow_encoder(tokenizer, ranks, text):
    assert tokenizer.encode(text) == reference(text, ranks)


@pytest.mark.parametrize("unit", ["a", "世", " ", "\n", "A", "!", "Qk9P", "\u0301", " \n", "'"])
def test_time_grows_about_linearly_on_endless_runs(tokenizer, unit):
    def seconds(length: int) -> float:
        text = (unit * length)[:length]
        times = []
        for _ in range(3):
            start = time.perf_counter()
            tokenizer.encode(text)
            times.append(time.perf_counter() - start)
        return min(times)

    # Twelve times the text: a quadratic encoder would take 144 times as long.
    assert seconds(240_000) < 60 * seconds(20_000) + 0.05


@given(st.text(st.sampled_from("a b\n世"), max_size=80), st.integers(1, 7), st.integers(7, 30))
def test_slices_join_to_the_text_and_keep_both_limits(text, max_run, max_slice):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longspan.chat.tokenizer.MAX_RUN", max_run)
        patch.setattr("longspan.chat.tokenizer.MAX_SLICE", max_slice)
        parts = slices(text)
    assert "".join(parts) == text
    for part in parts:
        assert len(part) <= max_slice
        assert all(len(found) <= max_run for found in regex.findall(r"\s+|\S+", part))


def test_ordinary_text_is_cut_at_the_slice_limit_only():
    text = "word " * (MAX_SLICE // 5 + 1)
    assert [len(part) for part in slices(text)] == [MAX_SLICE, 5]


def test_a_run_is_cut_at_each_multiple_of_its_limit_from_its_own_start():
    parts = slices("ab " + "x" * (2 * MAX_RUN + 5) + " c")
    assert [len(part) for part in parts] == [3 + MAX_RUN, MAX_RUN, 7]


# --- special tokens ----------------------------------------------------------------------------


def test_text_never_becomes_a_special_token(tokenizer):
    text = "".join(tokenizer.special)
    assert max(tokenizer.encode(text)) < tokenizer.n_base
    assert max(tokenizer.encode_segments([Segment(text), Segment("<|open|>")])) < tokenizer.n_base
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_follow_the_base_ids_and_unnamed_ones_are_reserved(tokenizer):
    n = tokenizer.n_base
    assert sorted(tokenizer.special.values()) == list(range(n, n + 256))
    assert tokenizer.vocab_size == n + 256
    assert tokenizer.special["<|end_of_msg|>"] == n + 2 and tokenizer.special["<|sep|>"] == n + 5
    assert tokenizer.special[f"<|reserved_token_{n + 200}|>"] == n + 200


def test_a_special_segment_may_mix_special_tokens_and_text(tokenizer):
    ids = tokenizer.encode_segments([Segment("<|media_begin|>image 3x4<|media_content|>", special=True)])
    begin, content = tokenizer.special["<|media_begin|>"], tokenizer.special["<|media_content|>"]
    assert ids == [begin, *tokenizer.encode("image 3x4"), content]


def test_segments_are_encoded_one_by_one(tokenizer):
    long = "the weather in Oslo " * 20
    segments = [Segment("the wea"), Segment("ther"), Segment("<|open|>", special=True), Segment(long)]
    expected = [*tokenizer.encode("the wea"), *tokenizer.encode("ther"), tokenizer.special["<|open|>"]]
    assert tokenizer.encode_segments(segments) == expected + tokenizer.encode(long)


def test_a_tokenizer_without_chat_tokens_refuses_to_render_a_chat(ranks):
    other = Tokenizer(ranks, {len(ranks) + 2: "<|im_end|>"})
    with pytest.raises(CheckpointError, match=r"no special token <\|open\|>.*completions"):
        other.encode_segments([Segment("<|open|>", special=True)])


# --- decoding ----------------------------------------------------------------------------------


@given(st.text())
def test_text_survives_the_way_there_and_back(tokenizer, text):
    sound = text.encode("utf-8", errors="replace").decode()
    assert tokenizer.decode(tokenizer.encode(sound)) == sound


@given(st.data())
@settings(max_examples=300)
def test_streamed_text_equals_the_full_decode_for_any_ids(tokenizer, data):
    any_id = st.integers(0, tokenizer.vocab_size - 1) | st.integers(128, 255)
    korean = st.sampled_from(list("안녕👩\u200d👧".encode()))
    ids = data.draw(st.lists(any_id | korean, max_size=40))
    skip_special = data.draw(st.booleans())
    decoder = tokenizer.incremental(skip_special=skip_special)
    streamed = "".join(decoder.push(token_id) for token_id in ids) + decoder.flush()
    assert streamed == tokenizer.decode(ids, skip_special=skip_special)


def test_an_invalid_byte_is_replaced_once_and_the_text_goes_on(tokenizer):
    decoder = tokenizer.incremental()
    pushed = [decoder.push(byte) for byte in b"a\x80b" + "안".encode()]
    assert pushed == ["a", "\ufffd", "b", "", "", "안"]


def test_a_stream_that_ends_inside_a_character_gets_its_tail_flushed(tokenizer):
    decoder = tokenizer.incremental()
    assert [decoder.push(byte) for byte in "안".encode()[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd" and decoder.flush() == ""
    assert decoder.push(ord("x")) == "x"


def test_special_tokens_are_shown_by_name_or_skipped(tokenizer):
    ids = [*tokenizer.encode("hi"), tokenizer.special["[EOS]"]]
    assert tokenizer.decode(ids) == "hi[EOS]"
    assert tokenizer.decode(ids, skip_special=True) == "hi"


@pytest.mark.parametrize("offset", [0, 1000])
def test_an_id_outside_of_the_vocabulary_is_refused_with_the_legal_range(tokenizer, offset):
    with pytest.raises(RequestError, match=f"0 to {tokenizer.vocab_size - 1}"):
        tokenizer.token_bytes(tokenizer.vocab_size + offset)
    with pytest.raises(RequestError):
        tokenizer.token_bytes(-1)


# --- files that are wrong ----------------------------------------------------------------------


def load(
    directory: Path, model: str | None = None, config: str | None = '{"added_tokens_decoder": {}}'
) -> Tokenizer:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (directory / "tiktoken.model").write_text("\n".join(lines) if model is None else model)
    if config is not None:
        (directory / "tokenizer_config.json").write_text(config)
    return Tokenizer.from_dir(directory)


def test_the_smallest_tokenizer_is_the_256_bytes(tmp_path):
    assert load(tmp_path).vocab_size == 512


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "lacks 256 of the 256 single-byte tokens"),
        ("AA== 0\nAA== 1", "line 2: token .* was listed before"),
        ("AA== 0\n???? 1", "line 2: expected a base64 token and its rank"),
        ("AA==", "line 1: expected a base64 token"),
        ("AA== zero", "line 1: expected a base64 token"),
        ("AA== 0\nAQ== 2", "none of rank 1"),
        ("AA== 0\nAQ== 0", "none of rank 1"),
    ],
)
def test_a_bad_model_file_is_refused_with_the_reason(tmp_path, model, says):
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path, model)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "Cannot read .*tokenizer_config.json"),
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a JSON object"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "expected a JSON object"),
        ('{"added_tokens_decoder": {"256": {}}}', "expected a JSON object"),
        ('{"added_tokens_decoder": {"256": {"content": 3}}}', "token 256 is not a string"),
        ('{"added_tokens_decoder": {"255": {"content": "a"}}}', "the id 255.*256 to 511"),
        ('{"added_tokens_decoder": {"512": {"content": "a"}}}', "the id 512.*256 to 511"),
        ('{"added_tokens_decoder": {"256": {"content": "a"}, "257": {"content": "a"}}}', "'a'.*id 257"),
        ('{"added_tokens_decoder": {"256": {"content": ""}}}', "''.*id 256"),
    ],
)
def test_a_bad_tokenizer_config_is_refused_with_the_reason(tmp_path, config, says):
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path, config=config)


def test_a_missing_model_file_is_refused_with_its_path(tmp_path):
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        Tokenizer.from_dir(tmp_path)


def test_a_model_of_another_vocabulary_size_is_refused(tokenizer):
    tokenizer.check_vocab_size(tokenizer.vocab_size)
    with pytest.raises(CheckpointError, match=f"vocab_size 163840, but .* has {tokenizer.vocab_size} ids"):
        tokenizer.check_vocab_size(163840)
