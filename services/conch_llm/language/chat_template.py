"""Chat templates: where a model has its template, and how messages become a prompt.

The rules are those of transformers' ``apply_chat_template``. Templates run in Jinja's sandbox. Time and size
are checked between the pieces that a template yields, and `range` is limited by the sandbox; a loop that
yields nothing, or one huge expression, is not interrupted. Templates are part of the model, so the operator
vouches for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError, message_of
from conch_llm.language.tool_calls import parser_of_template

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

MOST_SECONDS = 1.0
"""Limit of a rendering, in seconds of the thread's CPU time."""
MOST_CHARACTERS = 1 << 20
"""Limit of a prompt."""

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """The compiled templates of a model.

    Args:
        templates: Templates by name: ``default``, and ``tool_use`` for requests with tools.
        special_tokens: Variables such as ``bos_token``.

    Attributes:
        takes_tools: True if it shows tools to the model.
        tool_parser: Name of the parser of the calls that it writes, see `tool_calls`; empty if they have no
            known syntax.

    Raises:
        InvalidArgumentError: A template is malformed, or there is no ``default``.
        UnavailableError: jinja2 is not installed.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any] | None = None) -> None:
        if _DEFAULT not in templates:
            raise InvalidArgumentError(f"chat_template: no template has the name {_DEFAULT!r}")
        self._special_tokens = dict(special_tokens or {})
        self._compiled = {name: _compile(name, text) for name, text in templates.items()}
        with_tools = templates.get(_TOOL_USE, templates[_DEFAULT])
        self.takes_tools = "tools" in with_tools
        self.tool_parser = parser_of_template(with_tools)
        self._takes_parts = {name: takes_parts(text) for name, text in templates.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the prompt.

        Args:
            messages: OpenAI's messages. Their content becomes text or a list of parts, as the template wants,
                and the arguments of tool calls become objects.
            tools: OpenAI's tools.
            documents: Documents for retrieval.
            add_generation_prompt: True if the prompt ends with the start of the model's message.
            chat_template_kwargs: The request's further variables, such as ``enable_thinking``.

        Raises:
            InvalidArgumentError: The template refuses the messages, fails, or passes a limit.
        """
        name = _TOOL_USE if tools and _TOOL_USE in self._compiled else _DEFAULT
        variables = {
            **self._special_tokens,
            **_checked_kwargs(chat_template_kwargs or {}),
            "messages": _messages_for_template(messages, self._takes_parts[name]),
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        start = time.thread_time()
        for piece in _pieces(self._compiled[name], variables):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise InvalidArgumentError(
                    f"chat template: the prompt has more than {MOST_CHARACTERS} characters"
                )
            if time.thread_time() - start > MOST_SECONDS:
                raise InvalidArgumentError(f"chat template: rendering takes longer than {MOST_SECONDS:g} s")
        return "".join(pieces)


def load_chat_template(
    version_directory: Path | str,
    *,
    chat_template: str = "",
    tokenizer: str = "",
    config: Mapping[str, str] | None = None,
) -> ChatTemplate | None:
    """Finds and compiles the template of a model; None if it has none.

    Args:
        version_directory: Directory of the model version.
        chat_template: The parameter of this name: a file with the template.
        tokenizer: The parameter of this name: a folder with the files of a tokenizer.
        config: Members as of ``tokenizer_config.json``, for what no file has.

    Raises:
        InvalidArgumentError: A file is missing or malformed.
        UnavailableError: There is a template, but jinja2 is not installed.
    """
    directory = Path(version_directory)
    folders = [directory]
    if tokenizer:
        folders.append(find_path(directory, tokenizer, "tokenizer"))
    configs = [_read_object(folder / "tokenizer_config.json") for folder in folders]
    config = config or {}
    templates = _find_templates(directory, folders, configs, chat_template)
    if not templates and config.get("chat_template"):
        templates = {_DEFAULT: config["chat_template"]}
    if not templates:
        return None
    tokens: dict[str, Any] = _special_tokens(config)
    for folder, members in zip(reversed(folders), reversed(configs), strict=True):
        tokens |= _special_tokens(_read_object(folder / "special_tokens_map.json")) | _special_tokens(members)
    return ChatTemplate(templates, tokens)


def find_path(directory: Path, value: str, parameter: str) -> Path:
    """The path that a parameter names: relative to the version directory or the model's, or absolute.

    Raises:
        InvalidArgumentError: It does not exist.
    """
    for base in (directory, directory.parent):
        if (found := base / value).exists():
            return found
    raise InvalidArgumentError(f"parameter {parameter}: {value} does not exist in {directory} or its parent")


def takes_parts(template: str) -> bool:
    """True if a template loops over the parts of a message's content; else it takes text."""
    tree = _environment().parse(template)
    names: set[str] = set()
    before = -1
    while len(names) != before:  # names may be assigned from each other
        before = len(names)
        names.update(_names_of_content(tree, names))
    from jinja2 import nodes

    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _names_of_content(tree: nodes.Template, names: set[str]) -> Iterator[str]:
    """Names that are assigned a content, and parameters of macros that are called with one."""
    from jinja2 import nodes

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            yield assign.target.name
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            for parameter, argument in zip(macros[call.node.name].args, call.args, strict=False):
                if _is_content(argument, names):
                    yield parameter.name


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Or):
        return _is_content(node.left, names) or _is_content(node.right, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _find_templates(
    directory: Path, folders: Sequence[Path], configs: Sequence[Mapping[str, Any]], chat_template: str
) -> dict[str, str]:
    """Templates by name, from the first place that has any."""
    if chat_template:
        return {_DEFAULT: _read_text(find_path(directory, chat_template, "chat_template"))}
    for folder, config in zip(folders, configs, strict=True):
        if (file := folder / "chat_template.jinja").is_file():
            more = (folder / "additional_chat_templates").glob("*.jinja")
            return {**{each.stem: _read_text(each) for each in more}, _DEFAULT: _read_text(file)}
        value = config.get("chat_template")
        if isinstance(value, str):
            return {_DEFAULT: value}
        if value is not None:
            return _named_templates(value, folder)
    return {}


def _named_templates(value: object, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in value if isinstance(value, list) else [None]:
        if not isinstance(each, dict) or not all(
            isinstance(each.get(key), str) for key in ("name", "template")
        ):
            raise InvalidArgumentError(
                f"{folder / 'tokenizer_config.json'}: chat_template is neither a string nor a list of "
                '{"name", "template"}'
            )
        found[each["name"]] = each["template"]
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key.endswith("_token") and (token := _token(value)) is not None:
            found[key] = token
        elif key == "additional_special_tokens" and isinstance(value, list):
            found[key] = [token for each in value if (token := _token(each)) is not None]
    return found


def _token(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{file} can't be read: {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read_text(file))
    except ValueError as error:
        raise InvalidArgumentError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{file} is no JSON object")
    return found


def _checked_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if taken := sorted(_OWN.intersection(given)):
        raise InvalidArgumentError(f"chat_template_kwargs: {taken[0]} is a field of the request")
    return given


def _messages_for_template(messages: Sequence[Mapping[str, Any]], parts: bool) -> list[dict[str, Any]]:
    return [_message(message, f"messages[{position}]", parts) for position, message in enumerate(messages)]


def _message(message: Mapping[str, Any], field: str, parts: bool) -> dict[str, Any]:
    result = {name: value for name, value in message.items() if value is not None}
    content = result.setdefault("content", [] if parts else "")  # templates add and search it
    if parts and isinstance(content, str):
        result["content"] = [{"type": "text", "text": content}]
    elif not parts and isinstance(content, list):
        result["content"] = "\n".join(
            _part_text(part, f"{field}.content[{position}]") for position, part in enumerate(content)
        )
    calls = result.pop("tool_calls", None)  # some templates take an empty list for calls
    if calls:
        result["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{position}]") for position, call in enumerate(calls)
        ]
    return result


def _part_text(part: object, field: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InvalidArgumentError(f"{field}: the model's chat template takes text only, not {kind!r}")
    return text


def _tool_call(call: Any, field: str) -> Any:
    """A call of a message with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments") or "", str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{field}.function.arguments: no JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _pieces(template: Template, variables: Mapping[str, Any]) -> Iterator[str]:
    try:
        yield from template.generate(variables)
    except ConchError:
        raise
    except Exception as error:  # boundary: a template's code may raise anything
        raise InvalidArgumentError(f"chat template: {message_of(error) or type(error).__name__}") from None


def _compile(name: str, text: str) -> Template:
    try:
        from jinja2 import TemplateSyntaxError
    except ImportError:
        raise UnavailableError("chat templates need jinja2: pip install 'conch[llm]'") from None
    try:
        return _environment().from_string(text)
    except TemplateSyntaxError as error:
        raise InvalidArgumentError(f"chat template {name!r}, line {error.lineno}: {error.message}") from None


@cache
def _environment() -> Environment:
    """Jinja's sandbox with what templates may use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model has said, for training: rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=lineno)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(text: object) -> None:
    raise InvalidArgumentError(str(text))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
