"""Tokens to text as they come: final pieces that join to the decoded whole, cut at stop strings.

Each push costs time proportional to its new tokens. This module must not import torch.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from headrace.chat.tokenizer import Tokenizer
from headrace.engine.errors import BadRequestError


class Detokenizer:
    """Text of one sequence, piece by piece.

    Without a stop, all pieces joined are `tokenizer.decode(ids)`. Of the stop strings, the one
    completed first ends the text; of those completed by the same character, the longest. So the
    outcome does not depend on how ids are pushed.

    Args:
        tokenizer: the model's.
        skip_special_tokens: leave special tokens out of the text.
        stop: a string or several; none may be empty.
        include_stop_str: leave the stop string itself at the text's end.
        min_tokens: the text of this many first ids is not searched for stop strings.

    Attributes:
        stopped: the stop string found, else None. Nothing is emitted after it.
        consumed: ids pushed so far, or up to and including the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: str | Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise BadRequestError("stop must not hold an empty string", "stop")
        source = _ByteStream if tokenizer.byte_level else _WindowStream
        self._stream: _Stream = source(tokenizer, skip_special_tokens)
        self._include_stop_str, self._min_tokens = include_stop_str, min_tokens
        self._matcher = _StopMatcher(stops)
        self._held = ""  # final, but may be the beginning of a stop string
        self._trial: _Trial | None = None
        self.stopped: str | None = None
        self.consumed = 0

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the new text that nothing to come can change."""
        if self.stopped is not None:
            return ""
        if not self._matcher.stops:
            self.consumed += len(ids)
            return self._stream.feed(ids)
        emitted = ""
        for token in ids:
            self.consumed += 1
            if self.consumed <= self._min_tokens:
                emitted += self._stream.feed((token,))
                continue
            emitted += self._take(self._stream.feed((token,)))
            if self.stopped is None:
                emitted += self._try(self._stream.guess)
            if self.stopped is not None:
                break
        return emitted

    def finish(self) -> str:
        """Returns the rest: what was held back, unfinished characters as decode() shows them."""
        if self.stopped is not None:
            return ""
        emitted = self._take(self._stream.flush())
        held, self._held = self._held, ""
        return emitted + held

    def _take(self, text: str) -> str:
        """Matches final text; returns what need not be held back."""
        if not text:
            return ""
        self._trial = None
        found = self._matcher.feed(text)
        if found is not None:
            return self._stop(self._held + text, len(self._held), found)
        held = self._held + text
        cut = len(held) - self._matcher.hold
        self._held = held[cut:]
        return held[:cut]

    def _try(self, guess: str) -> str:
        """Matches text that is final only if the sequence ends here, as at a stop string."""
        if not guess:
            return ""
        if self._trial is None:
            self._trial = _Trial(self._matcher.copy())
        offset = len(self._held) + len(self._trial.text)
        self._trial.text += guess
        found = self._trial.matcher.feed(guess)
        return "" if found is None else self._stop(self._held + self._trial.text, offset, found)

    def _stop(self, text: str, offset: int, found: tuple[str, int]) -> str:
        stop, end = found
        self.stopped, self._held, self._trial = stop, "", None
        return text[: offset + end - (0 if self._include_stop_str else len(stop))]


class _Trial:
    __slots__ = ("matcher", "text")

    def __init__(self, matcher: _StopMatcher) -> None:
        self.matcher, self.text = matcher, ""


class _StopMatcher:
    """Knuth-Morris-Pratt: O(1) a character and stop string, wherever the borders of pieces fall."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self.borders = [_borders(stop) for stop in self.stops]
        self.states = [0] * len(
            self.stops
        )  # characters of each stop string that end the text so far

    def copy(self) -> _StopMatcher:
        twin = _StopMatcher(())
        twin.stops, twin.borders, twin.states = self.stops, self.borders, list(self.states)
        return twin

    @property
    def hold(self) -> int:
        """Length of the text's longest end that may begin a stop string."""
        return max(self.states, default=0)

    def feed(self, text: str) -> tuple[str, int] | None:
        """The stop string completed first, the longest of several, and its end in this text."""
        found: tuple[str, int] | None = None
        for index, stop in enumerate(self.stops):
            if not self.states[index] and stop[0] not in text:
                continue
            end = self._advance(index, text)
            if end is not None and (
                found is None or (end, -len(stop)) < (found[1], -len(found[0]))
            ):
                found = stop, end
        return found

    def _advance(self, index: int, text: str) -> int | None:
        stop, borders, state = self.stops[index], self.borders[index], self.states[index]
        for position, char in enumerate(text):
            while state and stop[state] != char:
                state = borders[state - 1]
            state += stop[state] == char
            if state == len(stop):
                return position + 1
        self.states[index] = state
        return None


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    borders, state = [0] * len(text), 0
    for position in range(1, len(text)):
        while state and text[state] != text[position]:
            state = borders[state - 1]
        state += text[state] == text[position]
        borders[position] = state
    return borders


class _Stream(Protocol):
    """Ids to final text.

    Attributes:
        guess: text that the last id completed but that a later id could still change.
    """

    guess: str

    def feed(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level tokenizers: bytes add up, and UTF-8 alone says which characters are complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.guess = ""
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        skip = self._skip
        return self._utf8.decode(b"".join([self._token_bytes(i) for i in ids if i not in skip]))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowStream:
    """Other tokenizers: decodes new tokens behind the one before them, which settles spaces.

    A run of byte tokens (<0xE4> <0xBD> ...) becomes text only when it ends: one bad byte turns the
    whole run into replacement characters. Until then `guess` has the characters that the run gives
    if it ends here.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.guess = ""
        self._backend = tokenizer.backend
        self._vocab_size = tokenizer.vocab_size
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._fallback = any(step["type"] == "ByteFallback" for step in tokenizer.decoder)
        self._context: list[int] = []  # tokens whose text is out, and that text
        self._context_text = ""
        self._pending: list[int] = []
        self._run = 0  # byte tokens at the end of _pending
        self._run_utf8: codecs.IncrementalDecoder | None = None

    def feed(self, ids: Sequence[int]) -> str:
        self.guess = ""
        for token in ids:
            text = self._backend.id_to_token(token) if 0 <= token < self._vocab_size else None
            if text is None or token in self._skip:
                continue
            self._pending.append(token)
            byte = _fallback_byte(text) if self._fallback else None
            self._extend_run(byte)
        return self._emit(len(self._pending) - self._run)

    def flush(self) -> str:
        self._run = 0
        return self._emit(len(self._pending))

    def _extend_run(self, byte: int | None) -> None:
        if byte is None:
            self._run = 0
            return
        if not self._run and (self._context or len(self._pending) > 1):
            # At the very beginning no guess is made: there the decoder may strip a space.
            self._run_utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._run += 1
        if self._run_utf8 is not None:
            try:
                self.guess = self._run_utf8.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._run_utf8 = None

    def _emit(self, count: int) -> str:
        """Text of the first `count` pending tokens; the caller sees to it that no run is cut."""
        if not count:
            return ""
        ready, self._pending = self._pending[:count], self._pending[count:]
        text = self._decode(self._context + ready)[len(self._context_text) :]
        self._set_context(self._context + ready)
        return text

    def _set_context(self, tokens: list[int]) -> None:
        """Keeps a short end with text: what decoders do to a beginning happens inside it."""
        length = 1
        while True:
            self._context = tokens[-length:]
            self._context_text = self._decode(self._context)
            if self._context_text or length >= len(tokens):
                return
            length *= 2

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
