"""Reads flags of restricted protocols and APIs, and tells addresses of the loopback interface from others."""

from __future__ import annotations

import ipaddress

from conch.door.operation_table import ACCESS_CATEGORIES


def parse_restricted_protocols(specifications: list[str]) -> dict[str, tuple[str, str]]:
    """Reads Triton's ``--grpc-restricted-protocol=<protocol,protocol>:<key>=<value>``.

    Raises:
        ValueError: One is malformed, or names an unknown category or one twice.
    """
    return {
        category: (f"triton-grpc-protocol-{key.lower()}", value)
        for category, (key, value) in _parse(specifications, "protocol").items()
    }


def parse_restricted_apis(specifications: list[str]) -> dict[str, tuple[str, str]]:
    """Reads Triton's ``--http-restricted-api=<api,api>:<key>=<value>``; raises as the other."""
    return {
        category: (key.lower(), value) for category, (key, value) in _parse(specifications, "api").items()
    }


def _parse(specifications: list[str], what: str) -> dict[str, tuple[str, str]]:
    restrictions: dict[str, tuple[str, str]] = {}
    for specification in specifications:
        groups, colon, secret = specification.partition(":")
        key, equals, value = secret.partition("=")
        if not (groups and colon and key and equals):
            raise ValueError(f"'{specification}' is not of the form '<{what}>,<{what}>:<key>=<value>'")
        for group in groups.split(","):
            if group not in ACCESS_CATEGORIES:
                raise ValueError(f"unknown restricted {what} '{group}'")
            if group in restrictions:
                raise ValueError(
                    f"restricted {what} '{group}' can not be specified in multiple config groups"
                )
            restrictions[group] = (key, value)
    return restrictions


def is_loopback(host: str) -> bool:
    """Returns whether an IP address is a loopback address, also as IPv4 mapped to IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback if mapped is None else bool(mapped.is_loopback)
