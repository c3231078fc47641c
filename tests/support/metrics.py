"""Reading metrics as a Prometheus would."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.support.waiting import PATIENCE_S

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(
    url: str, method: str = "GET", data: bytes | None = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of an answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, names, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def families(text: str, openmetrics: bool = False) -> dict[str, Metric]:
    """Families by name, as prometheus_client's own parsers read them."""
    parse: Any = parse_openmetrics if openmetrics else parse_text
    found = list(parse(text))
    assert len({family.name for family in found}) == len(found), "a family is there twice"
    return {family.name: family for family in found}


def samples(text: str, openmetrics: bool = False) -> Samples:
    """Values by name and labels."""
    found: Samples = {}
    written = set(re.findall(r"^[a-zA-Z_:][\w:]*", text, re.MULTILINE))
    for family in families(text, openmetrics).values():
        for sample in family.samples:
            # The parser of the text format has all counters end in ``_total``.
            name = sample.name if sample.name in written else sample.name.removesuffix("_total")
            assert name in written
            key = name, frozenset(sample.labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def scrape(url: str) -> Samples:
    """Samples of a server now."""
    status, _, body = get(url)
    assert status == 200
    return samples(body.decode())


def value(found: Samples, name: str, **labels: str) -> float | None:
    """One value; None if there is none."""
    return found.get((name, frozenset(labels.items())))


def of_model(found: Samples, model: str, name: str, **labels: str) -> float | None:
    """One value of version 1 of a model; None if there is none."""
    return value(found, name, model=model, version="1", **labels)
