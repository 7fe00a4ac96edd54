"""Chat messages to prompt text, by the model's own Jinja template.

Templates are code from a stranger: they run in Jinja's immutable sandbox, with what Hugging Face's
renderer offers them and nothing more. This module must not import torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.chat.tokenizer import Tokenizer
from headrace.engine.errors import BadRequestError

Message = dict[str, Any]

# Marks the end of the message to be continued: what the template puts behind it is cut off.
# Its space tells whether the template trims messages.
_END_MARK = "\ue0f1headrace-end\ue0f1"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """Prompt text of a conversation; encode it with add_special_tokens=False.

    Args:
        tokenizer: gives the template (`tool_use` if there are tools and the model has one) and its
            special tokens.
        messages: role, content (a string or text parts, which are joined by newlines) and what else
            templates know.
        add_generation_prompt: end with the beginning of the assistant's answer.
        tools: JSON schemas of functions, as OpenAI's clients write them.
        documents: for templates that know retrieved documents.
        continue_final_message: leave the last message open, to be gone on with. Excludes
            add_generation_prompt.
        chat_template: a Jinja template instead of the model's.
        kwargs: further variables for the template.

    Raises:
        BadRequestError: messages that cannot be rendered; `param` names the place
            (`messages[3].content`).
    """
    if reserved := sorted(set(kwargs) & set(_RESERVED)):
        raise BadRequestError(
            f"{reserved[0]} cannot be set as a template variable", "chat_template_kwargs"
        )
    if continue_final_message and add_generation_prompt:
        raise BadRequestError(
            "continue_final_message and add_generation_prompt exclude each other: set one to false",
            "continue_final_message",
        )
    chat = _checked_messages(messages)
    if continue_final_message:
        _mark_end(chat[-1], f"messages[{len(chat) - 1}].content")
    text = _render(
        chat_template or _pick_template(tokenizer, bool(tools)),
        {
            **tokenizer.special_tokens,
            **kwargs,
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_mark(text) if continue_final_message else text


def _pick_template(tokenizer: Tokenizer, with_tools: bool) -> str:
    templates = tokenizer.chat_templates
    template = templates.get("tool_use") if with_tools else None
    template = template or tokenizer.chat_template
    if template is not None:
        return template
    what = (
        f"only templates named {', '.join(sorted(templates))}" if templates else "no chat template"
    )
    raise BadRequestError(
        f"this model has {what}: pass chat_template, or send a plain prompt to completions",
        "messages",
    )


# --- messages -------------------------------------------------------------------------------------


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies as templates expect them: string contents, no empty keys, arguments as objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequestError("messages must be a list of at least one message", "messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise BadRequestError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequestError(f"{where}.role must be a string such as user", f"{where}.role")
    checked: Message = {key: value for key, value in message.items() if value is not None}
    if calls := checked.get("tool_calls"):
        checked["tool_calls"] = _checked_calls(calls, f"{where}.tool_calls")
    if "content" in checked:
        checked["content"] = _text_of(checked["content"], f"{where}.content")
    elif not calls:
        raise BadRequestError(f"{where}.content is missing", f"{where}.content")
    return checked


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadRequestError(f"{where} must be a string or a list of parts", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise BadRequestError(
                f"{where}[{i}] must be a part of type text, got {kind!r}: only text is read",
                f"{where}[{i}]",
            )
        if not isinstance(part.get("text"), str):
            raise BadRequestError(f"{where}[{i}].text must be a string", f"{where}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_calls(calls: Any, where: str) -> list[Any]:
    """Clients send a call's arguments as JSON text; templates want the object."""
    if not isinstance(calls, list):
        raise BadRequestError(f"{where} must be a list", where)
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = function["arguments"]
            place = f"{where}[{i}].function.arguments"
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise BadRequestError(f"{place} is no JSON", place) from error
            call = {**call, "function": {**function, "arguments": arguments}}
        checked.append(call)
    return checked


def _mark_end(message: Message, where: str) -> None:
    if "content" not in message:
        raise BadRequestError(f"{where} is missing: there is nothing to continue", where)
    message["content"] += _END_MARK + " "


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK)
    if at < 0:
        raise BadRequestError(
            "the chat template leaves out the last message, so it cannot be continued", "messages"
        )
    trimmed = not text.startswith(" ", at + len(_END_MARK))
    return text[:at].rstrip() if trimmed else text[:at]


# --- templates ------------------------------------------------------------------------------------


def _render(template: str, variables: dict[str, Any]) -> str:
    try:
        return _compiled(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise BadRequestError(
            f"the chat template is broken in line {error.lineno}: {_line(error)}", "chat_template"
        ) from error
    except Exception as error:  # the template's own code failed on these messages, in whatever way
        raise BadRequestError(
            f"the chat template refuses these messages: {_line(error)}", "messages"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}` marks tokens for training; here its body counts as it stands."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
