"""Settings and options of OpenAI's routes.

Imports little: the routes are imported where they are served.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conch.frontends.http.http_options import HttpOptions, HttpTlsFiles
from conch.server_options import AddOnOptions, AddOnSettings, Opening, PartOptions
from conch.settings.option import FlagError, Settings, option, settings_of
from conch.settings.option_checks import contents_of
from conch.settings.value_types import ANY_PORT, BOOL, DIRECTORY, FILE, NATURAL, POSITIVE, TEXT
from conch_llm.frontend.llm_metrics import LlmMetrics
from conch_llm.language.tool_calls import PARSERS
from conch_llm.openai_provider import OpenAiRoutes
from conch_llm.openai_settings import OpenAiSettings, TextDefaults

if TYPE_CHECKING:
    from conch.access.access_guard import Restrictions

_CATEGORIES = frozenset(("inference", "model-repository", "health"))


def _restrictions(specifications: list[str]) -> Restrictions:
    if not specifications:
        return {}
    from conch.frontends.access_policy import parse_restricted_apis

    found = parse_restricted_apis(specifications)
    unknown = sorted(found.keys() - _CATEGORIES)
    if unknown:
        raise ValueError(
            f"unknown restricted api '{unknown[0]}': OpenAI's routes have {', '.join(sorted(_CATEGORIES))}"
        )
    return found


def _refused(flag: str, reason: str, *harmless: str, kind: Any = TEXT) -> Any:
    """A flag of Triton's OpenAI front end that has no effect here, but for these values."""
    return option(flag, kind, None, unsupported=reason, choices=harmless, listed=False)


@dataclass(frozen=True, slots=True)
class LlmOptions(AddOnOptions):
    """The port of OpenAI's routes, and what is counted of them.

    Attributes:
        metrics: Counts what the routes do.
        routes: Settings of the routes.
        port: Options of the further port; None for none.
        keys: True if clients need an API key.
    """

    for_clients: ClassVar[bool] = True

    metrics: LlmMetrics
    routes: OpenAiSettings
    port: HttpOptions | None = None
    keys: bool = False

    @property
    def ports(self) -> Sequence[int]:
        """The further port, if any."""
        return () if self.port is None else (self.port.port,)

    def openings(self, options: PartOptions) -> Sequence[Opening]:
        """Inference on the further port."""
        from conch.process.exposure import INFERENCE, PRINCIPALS, clients_of

        if self.port is None:
            return ()
        clients = clients_of(self.port, "inference")
        if options.server.access_policy is not None:
            clients = PRINCIPALS
        elif self.keys:
            clients = "clients with an API key"
        return [Opening(INFERENCE, clients, "OpenAI")]


@dataclass(frozen=True, slots=True)
class LlmSettings(AddOnSettings):
    """OpenAI's routes, as the flags give them."""

    GROUP: ClassVar = "OpenAI"
    AFTER: ClassVar = {"OpenAI": "HTTP TLS"}
    PROTOCOLS: ClassVar = {"OpenAI": "openai"}

    allow: bool = option("--allow-openai", BOOL, True, "serve OpenAI's routes, /v1, on the REST port")
    port: int = option(
        "--openai-port",
        ANY_PORT,
        0,
        "further port with OpenAI's routes only, at the address and with the TLS of REST; 0 for none",
    )
    keys: tuple[str, ...] = option(
        "--openai-api-key",
        TEXT,
        help="key of which clients of OpenAI's routes must send one, as 'Authorization: Bearer' or 'api-key'",
        repeatable=True,
        secret=re.compile(""),
    )
    key_file: Path | None = option("--openai-api-key-file", FILE, None, "file with such keys, one a line")
    restrictions: Restrictions = option(
        "--openai-restricted-api",
        TEXT,
        help="<API,…>:<key>=<value>: OpenAI routes that need this header; an API is inference, "
        "model-repository or health",
        repeatable=True,
        secret=re.compile("[^=]*="),
        convert=_restrictions,
    )
    default_max_tokens: int | None = option(
        "--default-max-tokens",
        POSITIVE,
        None,
        "maximum tokens of an answer if the request has none; without it 16 for completions, and what the "
        "model allows for chats",
    )
    most_answers: int = option(
        "--openai-max-answers",
        POSITIVE,
        128,
        "maximum answers of one completion: its prompts times its choices, n",
    )
    store_bytes: int = option(
        "--openai-store-bytes",
        NATURAL,
        0,
        "maximum bytes of answers of /v1/responses kept in memory, for previous_response_id; 0 keeps none",
    )
    tokenizer: Path | None = option(
        "--openai-tokenizer",
        DIRECTORY,
        None,
        "folder of a tokenizer, whose chat template models without one of their own use",
        alias="--tokenizer",
    )
    chat_template: Path | None = option(
        "--chat-template", FILE, None, "file of the chat template of models without one of their own"
    )
    tool_parser: str = option(
        "--tool-call-parser",
        TEXT,
        "",
        "how models that do not say so write tool calls",
        choices=PARSERS,
        optional=True,
    )
    lora_separator: str = option(
        "--lora-separator",
        TEXT,
        "",
        "between a model and its adapter in names of models; without it an adapter has its own name",
        optional=True,
    )
    backend: None = _refused("--backend", "the config of each model tells what inputs it has")
    host: None = _refused("--host", "OpenAI's routes are served at --http-address")
    tool_bytes: None = _refused(
        "--max-tool-call-parse-bytes", "tool calls are read once, however long they are", "131072"
    )
    kserve: None = _refused(
        "--enable-kserve-frontends",
        "REST and gRPC are served unless --allow-http and --allow-grpc are false",
        "true",
        kind=BOOL,
    )
    kserve_http_port: None = _refused("--kserve-http-port", "the port of REST is --http-port")
    kserve_grpc_port: None = _refused("--kserve-grpc-port", "the port of gRPC is --grpc-port")
    uvicorn_log: None = _refused(
        "--uvicorn-log-level", "there is no uvicorn: the level of the log is --log-verbose", "info"
    )
    verbose_log: None = _refused(
        "--tritonserver-log-verbose-level", "the level of the log is --log-verbose", "0"
    )

    def add_to(self, options: PartOptions, settings: Settings) -> PartOptions:
        """Adds the routes to the REST port, and their own port.

        Raises:
            FlagError: Settings are wrong, or have no effect.
        """
        rest = self.allow and options.http is not None
        if not rest and not self.port:
            self._refuse_unused(settings)
            return options
        keys = self._keys()
        if keys and options.server.access_policy is not None:
            flag = "--openai-api-key" if self.keys else "--openai-api-key-file"
            raise FlagError(
                f"{flag}: with --access-policy clients send its keys and tokens, also as 'api-key'; leave it "
                f"out"
            )
        metrics = LlmMetrics()
        given = self._routes(keys)
        routes = OpenAiRoutes(given, metrics)
        port = None
        if self.port:
            port = replace(
                HttpOptions.from_settings(settings),
                port=self.port,
                reuse_port=False,
                tls=settings.build(HttpTlsFiles).checked("OpenAI's routes"),
                platform=routes,
            )
            port = replace(port, restrictions={**port.restrictions, **self.restrictions})
        if options.http is not None and rest:
            options = replace(options, http=replace(options.http, further=(*options.http.further, routes)))
        added = LlmOptions(metrics, given, port, bool(keys))
        return replace(options, add_ons={**options.add_ons, "llm": added})

    def _keys(self) -> tuple[str, ...]:
        """The keys of flags and file. Raises FlagError: one is empty, or the file can't be read."""
        found = list(self.keys)
        if self.key_file is not None:
            lines = contents_of(self, "key_file", "").decode(errors="replace").splitlines()
            found += filter(None, map(str.strip, lines))
            if len(found) == len(self.keys):
                raise FlagError(f"--openai-api-key-file: {self.key_file} has no key: expected one a line")
        for key in found:
            if not key.isascii() or not key.isprintable() or not key.strip() or " " in key:
                raise FlagError("--openai-api-key: a key is printable ASCII without spaces, and not empty")
        return tuple(found)

    def _routes(self, keys: tuple[str, ...]) -> OpenAiSettings:
        if self.chat_template is not None:
            contents_of(self, "chat_template", "")
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            raise FlagError(
                f"--openai-tokenizer: {self.tokenizer} is no directory: give a tokenizer's folder"
            )
        return OpenAiSettings(
            keys=keys,
            restrictions=self.restrictions,
            most_answers=self.most_answers,
            default_max_tokens=self.default_max_tokens,
            store_bytes=self.store_bytes,
            lora_separator=self.lora_separator,
            texts=TextDefaults(self.tokenizer, self.chat_template, self.tool_parser),
        )

    def _refuse_unused(self, settings: Settings) -> None:
        """Raises FlagError: a setting is for routes that are not served."""
        for each in settings_of(LlmSettings):
            if each.flag not in ("--allow-openai", "--openai-port") and settings.chosen(each.name):
                raise FlagError(f"{each.flag} needs --allow-openai with --allow-http, or --openai-port")
