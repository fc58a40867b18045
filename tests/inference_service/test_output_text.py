"""Stop strings and detokenizing: the output does not depend on how text is cut into tokens and deltas."""

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from inference_service.detokenizer import Detokenizer
from inference_service.output import OutputSequence, Piece
from inference_service.stop_strings import StopStrings
from inference_service.types import SequenceDelta, TokenLogprobs
from tests.inference_service.serving_fakes import EOS, byte_tokenizer

BYTES = byte_tokenizer()
texts = st.text(alphabet="abcé👩\u200d", max_size=30)
stop_lists = st.lists(st.text(alphabet="abcé👩", min_size=1, max_size=4), max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the text is cut, by the definition: the stop string that begins first, the shorter one of two."""
    found = [(text.find(s), len(s), s) for s in stops if s in text]
    return (min(found)[0], min(found)[2]) if found else None


def pieces_of(ids: list[int], stops: list[str], sizes: list[int], end: str) -> list[Piece]:
    """Feed `ids` in deltas of `sizes`, then the end; what comes out until the sequence has ended."""
    sequence, pieces, at = OutputSequence(Detokenizer(BYTES.backend), tuple(stops)), [], 0
    deltas = []
    while at < len(ids):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(ids[at : at + size])
        at += size
    events = [SequenceDelta("r", 0, d, [TokenLogprobs(i, -1.0) for i in d]) for d in deltas]
    last = [EOS] if end == "stop" else []
    events.append(SequenceDelta("r", 0, last, [TokenLogprobs(i, -1.0) for i in last], end))
    for event in events:
        pieces.append(sequence.feed(event, 0.0))
        if sequence.is_finished:
            break
    assert sequence.is_finished
    return pieces


@settings(max_examples=300, deadline=None)
@given(texts, stop_lists, st.lists(st.integers(1, 7), min_size=1, max_size=5), st.sampled_from(["stop", "length"]))
def test_output_is_the_text_cut_at_the_first_stop_string(
    text: str, stops: list[str], sizes: list[int], end: str
) -> None:
    ids = list(text.encode())
    pieces = pieces_of(ids, stops, sizes, end)
    match = first_match(text, stops)
    expected = text if match is None else text[: match[0]]
    assert "".join(p.text for p in pieces) == expected
    kept = [i for p in pieces for i in p.token_ids]
    assert [entry.token_id for p in pieces for entry in p.logprobs] == kept
    finish = pieces[-1].finish
    assert finish is not None
    if match is None:
        assert kept == ids + ([EOS] if end == "stop" else [])
        assert (finish.reason, finish.stop_string) == (end, None)
    else:
        # Up to the token that completes the match, and none after it.
        assert bytes(kept).decode() == text[: match[0] + len(match[1])]
        assert (finish.reason, finish.stop_string) == ("stop", match[1])


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_nothing_is_given_out_that_a_stop_string_takes_back(text: str, stops: list[str], data: st.DataObject) -> None:
    scanner, released, at = StopStrings(stops), "", 0
    while at < len(text) and scanner.matched is None:
        size = data.draw(st.integers(1, 5))
        released += scanner.feed(text[at : at + size])
        at += size
        match = first_match(text, stops)
        assert text.startswith(released)
        assert match is None or len(released) <= match[0]
    if scanner.matched is None:
        released += scanner.flush()
    match = first_match(text, stops)
    assert released == (text if match is None else text[: match[0]])
    assert scanner.matched == (None if match is None else match[1])


def test_a_longer_stop_string_that_begins_first_wins_if_it_completes() -> None:
    assert "".join(p.text for p in pieces_of(list(b"xabcd"), ["bc", "abcd"], [1], "length")) == "x"
    pieces = pieces_of(list(b"xabce!"), ["bc", "abcd"], [1], "length")
    assert "".join(p.text for p in pieces) == "xa"
    assert bytes(i for p in pieces for i in p.token_ids) == b"xabc"  # e came after the match was complete


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_detokenizer_gives_whole_characters_and_all_of_them(text: str) -> None:
    detokenizer = Detokenizer(BYTES.backend)
    pieces = [detokenizer.feed(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    for position, piece in enumerate(pieces, 1):
        is_complete = position == len(text.encode()) or (text.encode()[position] & 0xC0) != 0x80
        assert (piece != "") == is_complete or "\ufffd" in text


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=12))
def test_detokenizer_agrees_with_decode_on_any_bytes(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES.backend)
    text = "".join(detokenizer.feed(byte) for byte in data) + detokenizer.flush()
    assert text == BYTES.decode(list(data)) == data.decode(errors="replace")


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(BYTES.backend)
    assert [detokenizer.feed(i) for i in (97, EOS, 257, 98)] == ["a", "", "", "b"]


def test_incomplete_character_is_flushed_and_the_text_goes_on() -> None:
    detokenizer = Detokenizer(BYTES.backend)
    assert [detokenizer.feed(i) for i in (0x61, 0xE6, 0xBC)] == ["a", "", ""]
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""
    assert detokenizer.feed(0x62) == "b"


def test_spaces_of_sentencepiece_survive_between_tokens() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(backend)
    assert "".join(detokenizer.feed(i) for i in (1, 2, 3, 1)) + detokenizer.flush() == "a bc a"
