"""Incremental text: joins to the whole for any split; stop strings wherever a border falls."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.chat import detok
from headrace.chat.detok import Detokenizer
from headrace.chat.tokenizer import Tokenizer, load_tokenizer
from headrace.engine.errors import BadRequestError
from tests.models_for_tests import byte_fallback_backend, metaspace_backend


def byte_level() -> Tokenizer:
    """All single bytes, a few longer tokens, added tokens as plain text with and without spaces."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "Ġw", "Ã©"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("Ã", "©")]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken("<|end|>", special=True, normalized=False),
            AddedToken("<a b>", normalized=False),
            AddedToken("日本", normalized=False),
            AddedToken("Ġé", normalized=False),
        ]
    )
    return Tokenizer(backend)


def no_decoder() -> Tokenizer:
    words = {w: i for i, w in enumerate(["a", "bc", "<u>", "d"])}
    return Tokenizer(Backend(models.WordLevel(vocab=words, unk_token="<u>")))


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-fallback": Tokenizer(byte_fallback_backend()),
    "metaspace": Tokenizer(metaspace_backend()),
    "none": no_decoder(),
    "demo": load_tokenizer("smollm2"),
}


def splits(ids: Sequence[int], rng: random.Random) -> Iterable[Sequence[int]]:
    """The ids in pieces of random size, empty ones too."""
    at = 0
    while at < len(ids):
        size = rng.choice([0, 1, 1, 1, 2, 3, 7, 50])
        yield ids[at : at + size]
        at += size


def stream(tokenizer: Tokenizer, ids: Sequence[int], rng: random.Random, **options: Any) -> str:
    detokenizer = Detokenizer(tokenizer, **options)
    text = "".join(detokenizer.push(piece) for piece in splits(ids, rng)) + detokenizer.finish()
    assert detokenizer.finish() == ""
    return text


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Ids that make text, broken characters, runs of bytes, specials and ids from outside."""
    n = tokenizer.vocab_size
    ids: list[int] = []
    for _ in range(rng.randrange(8)):
        match rng.randrange(5):
            case 0:
                ids += tokenizer.encode(random_text(rng), add_special_tokens=False)
            case 1:
                ids += [rng.randrange(n) for _ in range(rng.randrange(9))]
            case 2:
                ids += [rng.randrange(min(n, 300)) for _ in range(rng.randrange(9))]
            case 3:
                ids += [rng.choice([n, n + 5, -1, 2**31, 2**40, -(2**70)])]
            case 4:
                ids += [rng.randrange(n)] * rng.randrange(5)
    return ids


def random_text(rng: random.Random) -> str:
    ranges = [
        (32, 127),
        (0xA0, 0x250),
        (0x4E00, 0x4E80),
        (0x1F600, 0x1F650),
        (9, 14),
        (0x300, 0x310),
    ]
    chars = []
    for _ in range(rng.randrange(12)):
        low, high = rng.choice(ranges)
        chars.append(chr(rng.randrange(low, high)))
    return "".join(chars)


def check_joins(tokenizer: Tokenizer, rounds: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        ids = random_ids(tokenizer, rng)
        for skip in (True, False):
            text = stream(tokenizer, ids, rng, skip_special_tokens=skip)
            assert text == tokenizer.decode(ids, skip), ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_whole(name: str) -> None:
    check_joins(TOKENIZERS[name], 1500)


@given(st.data())
@settings(max_examples=300)
def test_pieces_join_for_any_text_and_ids(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(sorted(TOKENIZERS)))]
    ids = tokenizer.encode(data.draw(st.text()), add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 2)))
    rng = random.Random(data.draw(st.integers(0, 99)))
    assert stream(tokenizer, ids, rng) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_it_is_final() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a日b")
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "日", "b"]
    held = Detokenizer(tokenizer, stop="hello")
    assert [held.push([i]) for i in tokenizer.encode("a he she")] == ["a", " ", "", "he ", "s", ""]
    assert held.finish() == "he" and held.stopped is None


def test_ids_outside_never_grow_the_cache() -> None:
    tokenizer = byte_level()
    Detokenizer(tokenizer).push(range(10_000, 20_000))
    assert not tokenizer._bytes


# --- stop strings ---------------------------------------------------------------------------------


def find_stop(text: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string completed first (the longest of several) and its end, by brute force."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return max(done, key=len), end
    return None


def check_stops(tokenizer: Tokenizer, rounds: int, seed: int = 1) -> int:
    """Returns how often a stop string was found."""
    rng, found_count = random.Random(seed), 0
    for _ in range(rounds):
        ids = random_ids(tokenizer, rng)
        full = tokenizer.decode(ids)
        stops = [random_stop(full, rng) for _ in range(rng.randrange(1, 4))]
        include = rng.random() < 0.5
        detokenizer = Detokenizer(tokenizer, stop=stops, include_stop_str=include)
        text = "".join(detokenizer.push(piece) for piece in splits(ids, rng))
        text += detokenizer.finish()
        full = text_until_stop(tokenizer, ids, stops)
        found = find_stop(full, stops)
        if found is None:
            assert text == full and detokenizer.stopped is None
            assert detokenizer.consumed == len(ids)
            continue
        found_count += 1
        stop, end = found
        assert detokenizer.stopped == stop, (ids, stops)
        assert text == full[: end if include else end - len(stop)]
        assert detokenizer.push(ids) == "" == detokenizer.finish()
        check_consumed(tokenizer, ids, stops, detokenizer.consumed)
    return found_count


def text_until_stop(tokenizer: Tokenizer, ids: list[int], stops: Sequence[str]) -> str:
    """The whole text, or up to a stop that ends in a run of byte tokens, good UTF-8 so far."""
    if not any(step["type"] == "ByteFallback" for step in tokenizer.decoder):
        return tokenizer.decode(ids)
    known = [
        (k, tokenizer.backend.id_to_token(i)) for k, i in enumerate(ids) if usable(tokenizer, i)
    ]
    run: list[int] | None = None  # None: from the beginning no token but byte tokens
    for n, (k, token) in enumerate(known):
        byte = int(token[3:5], 16) if token.startswith("<0x") else None
        if byte is None:
            run = []
        elif run is not None:
            run.append(byte)
        ended = n + 1 == len(known) or not known[n + 1][1].startswith("<0x")
        if ended or (run is not None and is_utf8(bytes(run))):
            text = tokenizer.decode(ids[: k + 1])
            if find_stop(text, stops) is not None:
                return text
    return tokenizer.decode(ids)


def usable(tokenizer: Tokenizer, token: int) -> bool:
    return 0 <= token < tokenizer.vocab_size and token not in tokenizer.special_ids


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_consumed(
    tokenizer: Tokenizer, ids: list[int], stops: Sequence[str], consumed: int
) -> None:
    """The stop is complete with these ids; with one less at most by characters in doubt."""
    assert find_stop(tokenizer.decode(ids[:consumed]), stops) is not None
    before = tokenizer.decode(ids[: consumed - 1]).rstrip("\ufffd")
    if tokenizer.byte_level:
        assert find_stop(before, stops) is None


def random_stop(text: str, rng: random.Random) -> str:
    if len(text) < 2 or rng.random() < 0.2:
        return rng.choice(["ab", "the", "\n", "日本", "e\u0301", "aab", "  "])
    start = rng.randrange(len(text) - 1)
    stop = text[start : start + rng.randrange(1, 6)]
    return stop if rng.random() < 0.8 else stop + rng.choice("ax")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stops_are_found_at_any_border(name: str) -> None:
    assert check_stops(TOKENIZERS[name], 1500) > 200


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 99),
)
@settings(max_examples=500)
def test_stops_that_overlap_themselves(text: str, stops: list[str], seed: int) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    found = find_stop(text, stops)
    streamed = stream(tokenizer, tokenizer.encode(text), random.Random(seed), stop=stops)
    assert streamed == (text if found is None else text[: found[1] - len(found[0])])


def test_first_completed_stop_wins_and_then_the_longest() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    for stops, stopped, text in [
        (["abcd", "bc"], "bc", "xa"),
        (["bc", "abc"], "abc", "x"),
        (["z", "d"], "d", "xabc"),
    ]:
        detokenizer = Detokenizer(tokenizer, stop=stops)
        assert detokenizer.push(tokenizer.encode("xabcdz")) == text
        assert detokenizer.stopped == stopped


def test_consumed_counts_ids_up_to_the_stop() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("a月b")
    detokenizer = Detokenizer(tokenizer, stop="月")
    assert detokenizer.push(ids[:2]) == "a" and detokenizer.consumed == 2
    assert detokenizer.push(ids[2:]) == "" and detokenizer.consumed == 4


def test_newline_as_a_byte_token_stops_at_once() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    newline, the, cat = (tokenizer.backend.token_to_id(t) for t in ("<0x0A>", "the", "▁cat"))
    detokenizer = Detokenizer(tokenizer, stop=["\n"])
    assert detokenizer.push([the, cat, newline]) == "the cat"
    assert detokenizer.stopped == "\n" and detokenizer.consumed == 3
    two = Detokenizer(tokenizer, stop=["\n\n"], include_stop_str=True)
    assert [two.push([i]) for i in (the, newline, newline, the)] == ["the", "", "\n\n", ""]
    assert two.consumed == 3


def test_stop_as_one_string_and_the_empty_one() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop="hell")
    assert detokenizer.push(tokenizer.encode("a hello")) == "a " and detokenizer.stopped == "hell"
    with pytest.raises(BadRequestError) as caught:
        Detokenizer(tokenizer, stop=["a", ""])
    assert caught.value.param == "stop"


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
@pytest.mark.parametrize("stop", [(), ("never this", "nor this"), ("a" * 500 + "!",)])
def test_cost_does_not_grow_with_the_text(name: str, stop: Sequence[str]) -> None:
    tokenizer = TOKENIZERS[name]
    a = tokenizer.backend.token_to_id("a")
    space = tokenizer.backend.token_to_id("▁")
    patterns = [[a]] if space is None else [[a], [space], [tokenizer.backend.token_to_id("é")]]
    for pattern in patterns:
        detokenizer, times = Detokenizer(tokenizer, stop=stop), []
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(1500):
                detokenizer.push(pattern)
            times.append(time.perf_counter() - start)
        assert min(times[3:]) < 3 * min(times[:3])


# --- mutants --------------------------------------------------------------------------------------


def fails(check: Any, *args: Any) -> None:
    with pytest.raises(AssertionError):
        check(*args)


def test_mutant_each_token_decoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: Any, ids: Sequence[int]) -> str:
        return "".join(TOKENIZERS["byte-level"].decode([i]) for i in ids)

    monkeypatch.setattr(detok._ByteStream, "feed", alone)
    fails(check_joins, TOKENIZERS["byte-level"], 200)


@pytest.mark.parametrize("name", ["byte-fallback", "metaspace"])
def test_mutant_window_without_context(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(detok._WindowStream, "_set_context", lambda self, tokens: None)
    fails(check_joins, TOKENIZERS[name], 200)


def test_mutant_context_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_only(self: Any, tokens: list[int]) -> None:
        self._context, self._context_text = tokens[-1:], self._decode(tokens)

    monkeypatch.setattr(detok._WindowStream, "_set_context", last_only)
    fails(check_joins, TOKENIZERS["byte-fallback"], 200)


def test_mutant_byte_runs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detok._WindowStream, "_extend_run", lambda self, byte: None)
    fails(check_joins, TOKENIZERS["byte-fallback"], 200)


def test_mutant_no_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detok._StopMatcher, "hold", property(lambda self: 0))
    fails(check_stops, TOKENIZERS["byte-level"], 200)


def test_mutant_matcher_forgets_at_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = detok._StopMatcher.feed

    def forgetful(self: Any, text: str) -> Any:
        self.states = [0] * len(self.stops)
        return feed(self, text)

    monkeypatch.setattr(detok._StopMatcher, "feed", forgetful)
    fails(check_stops, TOKENIZERS["byte-level"], 200)


def test_mutant_without_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detok, "_borders", lambda text: [0] * len(text))
    fails(test_stops_that_overlap_themselves)


def test_mutant_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Detokenizer, "_try", lambda self, guess: "")
    fails(test_newline_as_a_byte_token_stops_at_once)
