"""Builds the clients of examples/clients as their READMEs say, once for each content."""

from __future__ import annotations

import glob
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import ROOT

SOURCES = Path("examples") / "clients"
CACHE = Path(os.environ.get("CONCH_CLIENTS", Path.home() / ".cache" / "conch-tests" / "clients"))
"""Directory of builds and of the packages of npm; see tests/setup_clients.sh."""

_NO_SOURCES = shutil.ignore_patterns("README.md", "build", "target", "bin", "obj", "node_modules")


class NotBuildable(Exception):
    """A tool or library for building a client is missing."""


@dataclass(frozen=True)
class Language:
    """Build of a client.

    Attributes:
        tools: Programs that must be in PATH.
        libraries: Files that must exist, each a pattern.
        build: Commands in the client's directory, as in its README.
        run: The command that has the client's arguments behind it.
        setup: Script that installs the tools.
    """

    tools: tuple[str, ...]
    libraries: tuple[str, ...]
    build: tuple[str, ...]
    run: str
    setup: str = "tests/setup_clients.sh"


LANGUAGES = {
    "go": Language(
        ("make", "protoc", "go", "protoc-gen-go", "protoc-gen-go-grpc"),
        ("/usr/share/gocode/src/google.golang.org/grpc/version.go",),
        ("make",),
        "build/client",
    ),
    "java": Language(
        ("make", "protoc", "javac", "grpc_java_plugin"),
        ("/usr/share/java/grpc-netty.jar", "/usr/share/java/netty-tcnative.jar"),
        ("make",),
        "java -jar build/client.jar",
    ),
    "cpp": Language(
        ("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin"),
        ("/usr/include/grpcpp/version_info.h",),
        ("cmake -S . -B build", "cmake --build build --parallel"),
        "build/client",
    ),
    "node": Language(
        ("node",),
        (str(CACHE / "node_modules/@grpc/grpc-js/package.json"),),
        (),  # tests/setup_clients.sh does what `npm ci` does.
        "node client.js",
    ),
    "rust": Language(
        ("protoc", "cargo"),
        ("~/.cargo/registry/src/*/tonic-0.12.*/Cargo.toml",),
        ("cargo build",),
        "target/debug/client",
        "cargo fetch in examples/clients/rust",
    ),
    "csharp": Language(
        ("dotnet",),
        ("~/.nuget/packages/grpc.net.client/*/*.nuspec",),
        ("dotnet build",),
        "bin/Debug/net8.0/client",
        "dotnet restore in examples/clients/csharp",
    ),
}


def build_client(name: str) -> list[str]:
    """Builds the client of a language unless that has been done; returns the command that runs it.

    Raises:
        NotBuildable: A tool or a library is missing.
    """
    language = LANGUAGES[name]
    needed = [_found(tool, shutil.which(tool), language) for tool in language.tools]
    for pattern in language.libraries:
        matches = sorted(glob.glob(os.path.expanduser(pattern)))
        needed.append(_found(pattern, matches[-1] if matches else None, language))
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        tree = Path(scratch) / "tree"
        directory = tree / SOURCES / name
        shutil.copytree(ROOT / SOURCES / name, directory, ignore=_NO_SOURCES)
        shutil.copytree(ROOT / "proto", tree / "proto")
        built = CACHE / f"{name}-{_digest(tree, needed)}"
        if not built.exists():
            for command in language.build:
                _run(command, directory)
            try:
                tree.rename(built)
            except OSError:  # Another process has been quicker.
                assert built.exists()
    program, *arguments = shlex.split(language.run)
    directory = built / SOURCES / name
    return [_in(directory, program), *(_in(directory, argument) for argument in arguments)]


def _found(what: str, path: str | None, language: Language) -> Path:
    if path is None:
        raise NotBuildable(f"{what} is not installed; run {language.setup}")
    return Path(path)


def _in(directory: Path, part: str) -> str:
    return str(directory / part) if (directory / part).exists() else part


def _digest(tree: Path, needed: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    for path in needed:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _run(command: str, directory: Path) -> None:
    done = subprocess.run(
        shlex.split(command),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} in {directory.name}:\n{done.stdout}"
