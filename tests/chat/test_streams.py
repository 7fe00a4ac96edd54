"""Streamed text over many random strings and all tokens, and ids as transformers gives them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace.chat import detok
from headrace.chat.detok import Detokenizer
from headrace.chat.tokenizer import Tokenizer, load_tokenizer
from tests.models_for_tests import TEXTS, byte_fallback_backend

SPECIAL = "\u200d\ufe0f\u0301\u0000\r\n\t \u00a0\ufeff\ufffd\U0001f1e9\U0001f468\u2581▁Ġ"
RANGES = ((32, 127), (0xA0, 0x600), (0x900, 0xE00), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4))
BEYOND = ((0x1F300, 0x1FA00), (0x10000, 0x10400), (0xE0000, 0xE0080))


def random_string(rng: random.Random) -> str:
    """Of one script or several, with marks, joiners and spaces in between."""
    chars = []
    ranges = rng.choices(RANGES + BEYOND, k=rng.choice([1, 1, 2, 4]))
    for _ in range(rng.randrange(24)):
        low, high = rng.choice(ranges)
        chars.append(rng.choice(SPECIAL) if rng.random() < 0.15 else chr(rng.randrange(low, high)))
    return "".join(chars)


def streams_differ(tokenizer: Tokenizer, count: int, **options: Any) -> list[str]:
    """Strings whose streamed pieces, a token each, do not join to what decode() gives."""
    rng, wrong = random.Random(1), []
    for _ in range(count):
        text = random_string(rng)
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = Detokenizer(tokenizer, **options)
        joined = "".join([stream.push([i]) for i in ids]) + stream.finish()
        if joined != tokenizer.decode(ids):
            wrong.append(text)
    return wrong


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {"demo": load_tokenizer("smollm2"), "fallback": Tokenizer(byte_fallback_backend())}


@pytest.mark.parametrize("name", ["demo", "fallback"])
def test_ten_thousand_strings(tokenizers: dict[str, Tokenizer], name: str) -> None:
    assert streams_differ(tokenizers[name], 10_000) == []


@pytest.mark.parametrize("name", ["demo", "fallback"])
def test_strings_that_are_searched_for_a_stop(tokenizers: dict[str, Tokenizer], name: str) -> None:
    assert streams_differ(tokenizers[name], 1000, stop=["\x01never\x01"], min_tokens=3) == []


def test_what_the_fallback_encodes_comes_back(tokenizers: dict[str, Tokenizer]) -> None:
    """Byte tokens write any text but the space-like mark itself."""
    tokenizer, rng = tokenizers["fallback"], random.Random(2)
    for _ in range(1000):
        text = random_string(rng).replace("\u2581", "")
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", ["demo", "fallback"])
def test_every_token_alone(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    for skip in (True, False):
        for token in range(tokenizer.vocab_size + 2):
            stream = Detokenizer(tokenizer, skip_special_tokens=skip)
            assert stream.push([token]) + stream.finish() == tokenizer.decode([token], skip)


@pytest.mark.parametrize("name", ["demo", "fallback"])
def test_mutant_each_token_decoded_alone(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokenizer = tokenizers[name]
    stream = detok._ByteStream if tokenizer.byte_level else detok._WindowStream
    monkeypatch.setattr(stream, "feed", lambda self, ids: tokenizer.decode(ids))
    assert streams_differ(tokenizer, 100) != []


def test_the_same_ids_as_transformers(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, tokenizer in tokenizers.items():
        folder = tmp_path / name
        folder.mkdir()
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
        rng = random.Random(3)
        for text in [*TEXTS, *(random_string(rng) for _ in range(500))]:
            ids = ours.encode(text)
            assert ids == theirs.encode(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


# --- min_tokens -----------------------------------------------------------------------------------


def stops_at(tokenizer: Tokenizer, text: str, stop: str, least: int) -> tuple[str, int]:
    """The text up to a stop string, and the tokens consumed."""
    stream = Detokenizer(tokenizer, stop=stop, min_tokens=least)
    out = "".join([stream.push([i]) for i in tokenizer.encode(text)]) + stream.finish()
    return out, stream.consumed


def min_tokens_faults(tokenizer: Tokenizer) -> list[str]:
    """Where stop strings count too early, or are missed later."""
    text, wrong = "one; two; three; four", []
    ids = tokenizer.encode(text)
    pieces = [tokenizer.decode([i]) for i in ids]
    for least in range(len(ids) + 2):
        free = len("".join(pieces[:least]))
        at = text.find(";", free)
        want = text if at < 0 else text[:at]
        got, consumed = stops_at(tokenizer, text, ";", least)
        if got != want or consumed < min(least, len(ids)):
            wrong.append(f"{least}: {got!r}, not {want!r}")
    return wrong


def test_min_tokens_let_stop_strings_pass(tokenizers: dict[str, Tokenizer]) -> None:
    assert min_tokens_faults(tokenizers["demo"]) == []


def test_mutant_stop_strings_count_from_the_beginning(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Detokenizer.__init__
    monkeypatch.setattr(
        Detokenizer, "__init__", lambda s, *args, min_tokens=0, **rest: init(s, *args, **rest)
    )
    assert min_tokens_faults(tokenizers["demo"]) != []
