"""Text to token ids and back, over the `tokenizers` library, from a directory or a GGUF file.

It gives the ids that the model was trained with, so each source's own settings decide: added and
special tokens, begin and end tokens, the pre-tokenizer that a GGUF only names. This module must not
import torch or transformers, and imports gguf only for a .gguf file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from headrace.engine.errors import BadRequestError, LoadError
from headrace.loader.hub import ModelFiles, locate

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# ggml's token types that are not plain vocabulary.
CONTROL, USER_DEFINED = 3, 4
# How a GGUF's pre-tokenizer splits text before byte-level BPE; those that are certain.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")


class Tokenizer:
    """One model's tokenizer; safe to use from several threads.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        vocab_size: highest id plus one.
        special_ids: ids of special tokens, which decode() may skip.
        eos_ids: ids that end a generation; may be empty.
        bos_id: id that begins a sequence, if the model has one.
        special_tokens: `bos_token`, `eos_token`, ... -> text, for chat templates.
        chat_templates: name -> Jinja source; the usual one is `default`.
        decoder: the steps of the backend's decoder, as `tokenizers` writes them, outer sequences
            opened.

    Raises:
        LoadError: a decoder whose text of one token depends on more than the tokens just before it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # tokenizer.json may carry the limits of some training run
        backend.no_padding()
        self.backend = backend
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.decoder = _decoder_steps(backend)
        self._bytes: dict[int, bytes] = {}

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text.

        Raises:
            BadRequestError: no string, or one with lone surrogates, which no UTF-8 text has.
        """
        if not isinstance(text, str):
            raise BadRequestError(f"prompt must be a string, got {type(text).__name__}", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(
                f"prompt is no valid Unicode: lone surrogate at character {error.start}", "prompt"
            ) from error
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            _raise_if_not_rusts(error)
            why = f"the tokenizer cannot encode the prompt: {_line(error)}"
            raise BadRequestError(why, "prompt") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids outside the vocabulary decode to nothing."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        text: str = self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def byte_level(self) -> bool:
        """Whether each token stands for fixed bytes, whatever its neighbours."""
        return [step["type"] for step in self.decoder] == ["ByteLevel"]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id of a byte-level tokenizer; none for an id outside the vocabulary."""
        piece = self._bytes.get(token)
        if piece is None:
            text = (self.backend.id_to_token(token) or "") if 0 <= token < self.vocab_size else ""
            try:
                piece = bytes(map(_BYTE_OF_CHAR.__getitem__, text))
            except KeyError:  # an added token, written as plain text
                piece = text.encode()
            if 0 <= token < self.vocab_size:  # else ids made up by a client would grow the cache
                self._bytes[token] = piece
        return piece

    def piece(self, token: int) -> str:
        """The text of one id by itself, its space before included; "" for one it does not know."""
        if self.byte_level:
            return self.token_bytes(token).decode("utf-8", "replace")
        text = self.backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        return (text or "").replace("\u2581", " ")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    known = kinds == ["ByteLevel"] or set(kinds) <= {
        "Replace",
        "ByteFallback",
        "Fuse",
        "Strip",
        "Metaspace",
    }
    fused = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
    across = any(
        s["type"] == "Replace" and len(s["pattern"].get("String", "  ")) > 1 for s in fused
    )
    if not known or across or any(step.get("stop") for step in steps):
        raise LoadError(f"the tokenizer's decoder ({', '.join(kinds)}) is not supported")
    return steps


def load_tokenizer(files: ModelFiles | str | Path) -> Tokenizer:
    """Builds the tokenizer that lies with a model.

    Raises:
        LoadError: files missing, broken, or of a kind that is not read.
        ModelNotFoundError: a path that leads nowhere.
    """
    if not isinstance(files, ModelFiles):
        path = Path(files)
        # A tokenizer may lie in a directory of its own, without the config.json of a model.
        bare = (path / "tokenizer.json").is_file()
        files = ModelFiles(path, "hf", path.name) if bare else locate(str(files))
    return _from_gguf(files.path) if files.kind == "gguf" else _from_directory(files.path)


# --- Hugging Face directories ---------------------------------------------------------------------


def _from_directory(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        raise LoadError(_no_tokenizer(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except BaseException as error:
        _raise_if_not_rusts(error)
        raise LoadError(f"{path / 'tokenizer.json'} cannot be read: {_line(error)}") from error
    # Its add_bos_token counts for nothing beside a tokenizer.json; transformers agrees.
    config = _json(path / "tokenizer_config.json")
    named = _named_tokens(config, _json(path / "special_tokens_map.json"))
    _add_tokens(backend, config.get("added_tokens_decoder"), named, path)
    eos = _ids(backend.token_to_id(named["eos_token"])) if "eos_token" in named else set()
    bos = _ids(backend.token_to_id(named["bos_token"])) if "bos_token" in named else set()
    bos = bos or _ids(_json(path / "config.json").get("bos_token_id"))
    return Tokenizer(
        backend,
        eos_ids=eos,
        bos_id=min(bos, default=None),
        special_tokens=named,
        chat_templates=_templates(path, config),
    )


def _no_tokenizer(path: Path) -> str:
    if (path / "tokenizer.model").is_file():
        return (
            f"{path} has only tokenizer.model (SentencePiece), which is not read; "
            "write a tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(dir).save_pretrained(dir)"
        )
    return f"{path} has no tokenizer.json; give one (tokenizer=...) or set skip_tokenizer_init"


def _json(path: Path) -> dict[str, Any]:
    """The file's object; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {_line(error)}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds no JSON object")
    return value


def _raise_if_not_rusts(error: BaseException) -> None:
    """Lets pass what is not the library's: it raises plain Exception, and on a panic worse."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if type(v) is int and v >= 0}


def _named_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of the first source that has them, as a string or an object."""
    named = {}
    for name in NAMED:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                named[name] = text
                break
    return named


def _add_tokens(
    backend: tokenizers.Tokenizer, declared: Any, named: Mapping[str, str], path: Path
) -> None:
    """Adds what tokenizer_config.json declares beyond tokenizer.json; named tokens are special."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    tokens: list[AddedToken] = []
    declared = declared if isinstance(declared, dict) else {}
    for key, entry in sorted(declared.items(), key=lambda item: (len(item[0]), item[0])):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise LoadError(f"{path / 'tokenizer_config.json'}: added token {key} has no content")
        flags = {
            name: bool(entry[name])
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if name in entry
        }
        known = backend.token_to_id(entry["content"]) is not None
        if not known or (flags.get("special") and entry["content"] not in special):
            tokens.append(AddedToken(entry["content"], **flags))
            special.add(entry["content"])
    for text in dict.fromkeys(named.values()):
        if text not in special and backend.token_to_id(text) is not None:
            tokens.append(AddedToken(text, special=True, normalized=False))
    if tokens:
        backend.add_tokens(tokens)
    for key, entry in declared.items():
        if str(backend.token_to_id(entry["content"])) != key:
            raise LoadError(
                f"{path / 'tokenizer_config.json'} gives {entry['content']!r} the id {key}, "
                "tokenizer.json another"
            )


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    for entry in value if isinstance(value, list) else ():
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (0, 0)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise LoadError(
                f"{path / 'tokenizer_config.json'}: chat_template has an entry without name or text"
            )
        templates[name] = text
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            templates["default"] = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise LoadError(f"{file} cannot be read: {_line(error)}") from error
    return templates


# --- GGUF -----------------------------------------------------------------------------------------


def _from_gguf(path: Path) -> Tokenizer:
    from headrace.loader.gguf_file import GGUFFile

    metadata = GGUFFile(path).metadata

    def read(key: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and not isinstance(value, kind):
            raise LoadError(f"{path}: tokenizer.ggml.{key} has the wrong type")
        return value

    if (model := read("model", str)) != "gpt2":
        raise LoadError(
            f"{path}: tokenizer of kind {model!r} is not read, only gpt2; give one (tokenizer=...)"
        )
    tokens, pre = read("tokens", list, []), read("pre", str)
    if not tokens or not all(isinstance(t, str) for t in tokens):
        raise LoadError(f"{path}: tokenizer.ggml.tokens holds no tokens")
    backend = _byte_level_bpe(tokens, read("merges", list, []), pre, path)
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED) and token
        ]
    )
    ids = {
        name: token
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if (token := read(f"{name}_token_id", int)) is not None and 0 <= token < len(tokens)
    }
    named = {
        f"{alias}_token": tokens[ids[name]]
        for name, alias in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if name in ids
    }
    add_bos = read("add_bos_token", bool, pre == "llama-bpe")
    _put_around(
        backend,
        named.get("bos_token") if add_bos else None,
        named.get("eos_token") if read("add_eos_token", bool, False) else None,
    )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_ids={ids[name] for name in ("eos", "eot", "eom") if name in ids},
        bos_id=ids.get("bos"),
        special_tokens=named,
        chat_templates={"default": template} if isinstance(template, str) else {},
    )


def _byte_level_bpe(
    tokens: list[str], merges: list[Any], pre: str | None, path: Path
) -> tokenizers.Tokenizer:
    byte_level = pre_tokenizers.ByteLevel
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False)]
    elif pre == "gpt-2":
        split = [byte_level(add_prefix_space=False)]
    elif pre in ("llama-bpe", "qwen2"):
        regex = Regex(_LLAMA3 if pre == "llama-bpe" else _QWEN2)
        split = [
            pre_tokenizers.Split(regex, "isolated"),
            byte_level(add_prefix_space=False, use_regex=False),
        ]
    else:
        raise LoadError(
            f"{path}: pre-tokenizer {pre!r} is not known (only smollm, gpt-2, llama-bpe, qwen2); "
            "give the original tokenizer (tokenizer=...)"
        )
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        vocab = {token: i for i, token in enumerate(tokens)}
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise LoadError(f"{path}: the tokenizer's merges are broken: {_line(error)}") from error
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.ByteLevel()
    return backend


def _put_around(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Sets the begin and end tokens that encode() adds."""
    around = [(t, backend.token_to_id(t)) for t in (bos, eos) if t is not None]
    known = {text: token for text, token in around if token is not None}
    pieces = [bos, "$A", eos]
    backend.post_processor = TemplateProcessing(
        single=[piece for piece in pieces if piece == "$A" or piece in known],
        special_tokens=list(known.items()),
    )
