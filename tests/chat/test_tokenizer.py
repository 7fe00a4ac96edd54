"""Tokenizers: the model's own ids from both kinds of files; one line for others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from headrace.chat import tokenizer as module
from headrace.chat.tokenizer import Tokenizer, load_tokenizer
from headrace.engine.errors import BadRequestError, LoadError, ModelNotFoundError
from headrace.loader.gguf_file import GGUFFile
from headrace.loader.hub import locate
from tests.models_for_tests import (
    byte_fallback_backend,
    demo_path,
    gguf_bytes,
    tiny_gguf_metadata,
)

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\ttabs\r\n",
    "naïve café, Straße, Ωmega",
    "日本語のテキスト и русский",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301",
    "I'm, you'll; THEY'VE 's",
    "def f(x):\n    return x  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x07\u200b\ufeff\ufffd",
]
DIGITS = ["1234567890", "in 2024 there were 3.14159", "a1b22c333", "٣٤ ½ ²"]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    """The demo's tokenizer put together by hand."""
    metadata = GGUFFile(demo_path()).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=dict(zip(tokens, range(len(tokens)), strict=True)), merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:17]])
    return backend


def test_demo_properties(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.special_ids == frozenset(range(17))
    assert (demo.bos_id, demo.eos_ids) == (1, frozenset({2}))
    assert demo.special_tokens["eos_token"] == "<|im_end|>"
    assert demo.chat_template is not None and "<|im_start|>" in demo.chat_template


@pytest.mark.parametrize("text", TEXTS + DIGITS)
def test_demo_ids_equal_the_reference(
    demo: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    ids = demo.encode(text)
    assert ids == reference.encode(text).ids
    assert demo.decode(ids, skip_special_tokens=False) == text


def test_demo_equals_the_reference_on_any_text(
    demo: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    @given(st.text(max_size=200), st.booleans())
    def check(text: str, skip: bool) -> None:
        # Not a round trip: the model's vocabulary lacks some bytes, which are dropped.
        ids = demo.encode(text)
        assert ids == reference.encode(text).ids
        assert demo.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)

    check()


def test_digits_are_single_tokens(demo: Tokenizer) -> None:
    assert [demo.decode([i]) for i in demo.encode("2024")] == ["2", "0", "2", "4"]


def test_demo_equals_transformers_without_digits(demo: Tokenizer) -> None:
    path = demo_path()
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        assert demo.encode(text) == theirs.encode(text), text


def test_mutant_without_digits_is_caught(
    reference: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module.pre_tokenizers, "Digits", lambda **options: pre_tokenizers.Punctuation("contiguous")
    )
    mutant = load_tokenizer("smollm2")
    assert any(mutant.encode(text) != reference.encode(text).ids for text in DIGITS)


def test_decode_of_ids_outside(demo: Tokenizer) -> None:
    inside = demo.encode("hello")
    assert demo.decode([-1, 2**40, 49152, *inside, -(2**70)]) == "hello"


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", None, 3, b"bytes"])
def test_texts_that_are_none(demo: Tokenizer, text: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        demo.encode(text)
    assert caught.value.param == "prompt"


def test_mutant_without_the_surrogate_check(demo: Tokenizer) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        demo.backend.encode("a\ud800")


# --- Hugging Face directories ---------------------------------------------------------------------


def directory(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_directory_equals_gguf_and_transformers(tmp_path: Path, demo: Tokenizer) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": "x",
    }
    path = directory(tmp_path, demo.backend, tokenizer_config=config)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(str(path))
    assert ours.eos_ids == {2} == {theirs.eos_token_id} and ours.bos_id == 1
    assert ours.special_ids == demo.special_ids and ours.vocab_size == 49152
    assert load_tokenizer(locate(str(path))).chat_template == "x"
    for text in TEXTS + DIGITS:
        ids = ours.encode(text)
        assert ids == demo.encode(text) == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("bos", [None, False, True])
@pytest.mark.parametrize("eos", [None, False, True])
def test_begin_and_end_tokens_equal_transformers(
    tmp_path: Path, bos: bool | None, eos: bool | None
) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    config |= {} if bos is None else {"add_bos_token": bos}
    config |= {} if eos is None else {"add_eos_token": eos}
    path = directory(tmp_path, byte_fallback_backend(), tokenizer_config=config)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(str(path))
    for text in ("the cat", "é 日", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    backend = byte_fallback_backend()
    n = backend.get_vocab_size()
    added = {
        "0": {"content": "<unk>", "special": True},
        str(n): {"content": "<tool>", "special": False, "normalized": False},
        str(n + 1): {"content": "<end>", "special": True, "normalized": False},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "eos_token": "<end>",
    }
    path = directory(tmp_path, backend, tokenizer_config=config)
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(str(path))
    assert ours.vocab_size == n + 2 and ours.eos_ids == {n + 1}
    text = "the<tool>cat<end>"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode([n, n + 1]) == "<tool>" and ours.decode([n + 1], False) == "<end>"
    config["added_tokens_decoder"] = {"7": {"content": "<tool>"}}
    directory(tmp_path, backend, tokenizer_config=config)
    with pytest.raises(LoadError, match="the id 7"):
        load_tokenizer(path)


def test_named_tokens_are_special(tmp_path: Path) -> None:
    path = directory(
        tmp_path, byte_fallback_backend(), special_tokens_map={"eos_token": {"content": "x"}}
    )
    ours = load_tokenizer(path)
    x = ours.backend.token_to_id("x")
    assert ours.eos_ids == {x} and x in ours.special_ids and ours.decode([x]) == ""


def test_sources_of_eos_and_bos(tmp_path: Path) -> None:
    """What a model's configs say of its ends is not the tokenizer's business."""
    backend = byte_fallback_backend()
    path = directory(tmp_path, backend, generation_config={"eos_token_id": [5, 6]})
    assert load_tokenizer(path).eos_ids == frozenset()
    directory(
        tmp_path,
        backend,
        tokenizer_config={"eos_token": "</s>"},
        config={"eos_token_id": 9, "bos_token_id": 1},
    )
    assert load_tokenizer(path).eos_ids == {2} and load_tokenizer(path).bos_id == 1


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = byte_fallback_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    path = directory(tmp_path, backend)
    assert (
        len(tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode("a b c").ids) == 50
    )
    assert 2 < len(load_tokenizer(path).encode("a b c")) < 50


def test_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    path = directory(
        tmp_path, byte_fallback_backend(), tokenizer_config={"chat_template": templates}
    )
    assert load_tokenizer(path).chat_templates == {"default": "A", "tool_use": "B"}
    (path / "chat_template.jinja").write_text("é")
    assert load_tokenizer(path).chat_template == "é"
    (path / "chat_template.jinja").write_bytes(b"\xff")
    check_load_error(path, "chat_template.jinja")
    directory(tmp_path, byte_fallback_backend(), tokenizer_config={"chat_template": [{"name": 1}]})
    check_load_error(path, "without name")


def check_load_error(path: Path, words: str) -> None:
    with pytest.raises(LoadError) as caught:
        load_tokenizer(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", ["", "{", "[]", '{"version": "1.0"}', '{"model": null}', "\x00"])
def test_broken_tokenizer_json(tmp_path: Path, raw: str) -> None:
    path = directory(tmp_path, byte_fallback_backend())
    (path / "tokenizer.json").write_text(raw)
    check_load_error(path, "tokenizer.json cannot be read")


@pytest.mark.parametrize("raw", ["", "{", "[]", "[" * 100_000])
def test_broken_configs(tmp_path: Path, raw: str) -> None:
    path = directory(tmp_path, byte_fallback_backend())
    (path / "tokenizer_config.json").write_text(raw)
    check_load_error(path, "tokenizer_config.json")


def test_broken_added_token(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"3": "text"}}
    path = directory(tmp_path, byte_fallback_backend(), tokenizer_config=config)
    check_load_error(path, "added token 3")


def test_only_sentencepiece_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_load_error(tmp_path, "no tokenizer.json")
    (tmp_path / "tokenizer.model").touch()
    check_load_error(tmp_path, "only tokenizer.model")
    with pytest.raises(ModelNotFoundError):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a"), "")]),
    ],
)
def test_decoders_that_cannot_stream_are_refused(tmp_path: Path, decoder: Any) -> None:
    backend = byte_fallback_backend()
    backend.decoder = decoder
    check_load_error(directory(tmp_path, backend), "decoder")


def test_imports(tmp_path: Path) -> None:
    path = directory(tmp_path, byte_fallback_backend())
    script = (
        "import sys; from headrace.chat.tokenizer import load_tokenizer\n"
        "import headrace.chat.detok, headrace.chat.template\n"
        f"t = load_tokenizer({str(path)!r}); assert t.decode(t.encode('the cat')) == 'the cat'\n"
        "bad = {'torch', 'gguf', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# --- GGUF -----------------------------------------------------------------------------------------


def gguf(folder: Path, **changes: Any) -> Path:
    metadata = tiny_gguf_metadata()
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    path = folder / "a.gguf"
    path.write_bytes(gguf_bytes({k: v for k, v in metadata.items() if v is not None}))
    return path


def test_gguf_token_types(tmp_path: Path) -> None:
    ours = load_tokenizer(gguf(tmp_path))
    assert ours.special_ids == {0, 1}
    tool = ours.vocab_size - 1
    assert ours.encode("hell<tool>") == [ours.backend.token_to_id("hell"), tool]
    assert ours.decode([0, tool]) == "<tool>"


def test_gguf_begin_and_end(tmp_path: Path) -> None:
    plain = load_tokenizer(gguf(tmp_path)).encode("hell")
    assert load_tokenizer(gguf(tmp_path, add_bos_token=True)).encode("hell") == [1, *plain]
    both = load_tokenizer(gguf(tmp_path, add_bos_token=True, add_eos_token=True))
    assert both.encode("hell") == [1, *plain, 0] and both.encode("hell", False) == plain
    llama = load_tokenizer(gguf(tmp_path, pre="llama-bpe", add_bos_token=None, eot_token_id=5))
    assert llama.encode("hell") == [1, *plain] and llama.eos_ids == {0, 5}


def pieces(path: Path, text: str) -> list[str]:
    pre = load_tokenizer(path).backend.pre_tokenizer
    assert pre is not None
    return [piece for piece, _ in pre.pre_tokenize_str(text)]


def test_gguf_pre_tokenizers(tmp_path: Path) -> None:
    text = "It's 12345"
    assert pieces(gguf(tmp_path, pre="smollm"), text) == ["It", "'s", "Ġ", *"12345"]
    assert pieces(gguf(tmp_path, pre="gpt-2"), text) == ["It", "'s", "Ġ12345"]
    assert pieces(gguf(tmp_path, pre="llama-bpe"), text) == ["It", "'s", "Ġ", "123", "45"]
    assert pieces(gguf(tmp_path, pre="qwen2"), text) == ["It", "'s", "Ġ", *"12345"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"model": None}, "None"),
        ({"pre": "strange"}, "'strange'"),
        ({"pre": None}, "None"),
        ({"pre": 3}, "wrong type"),
        ({"tokens": None}, "no tokens"),
        ({"tokens": np.arange(3)}, "wrong type"),
        ({"merges": ["h q"]}, "merges are broken"),
        ({"merges": ["he"]}, "merges are broken"),
        ({"add_bos_token": 1}, "wrong type"),
    ],
)
def test_gguf_errors(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    check_load_error(gguf(tmp_path, **changes), words)
