"""Builds and runs an image without a container runtime: a Dockerfile's steps in directories and namespaces.

It knows the instructions that deploy/Dockerfile has, and fails with any other. It needs root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_NEW_NAMESPACES = ("unshare", "--mount", "--propagation=private", "--pid", "--fork")
_STEP = """
set -eu
root=$1 packages=$2; shift 2
mount -t proc proc "$root/proc"
mkdir -p "$root/packages"
mount --bind "$packages" "$root/packages"
exec chroot "$root" "$@"
"""
# As a container runtime with a read-only root file system, 64 MiB of /dev/shm and a volume for /tmp.
_CONTAINER = """
set -eu
root=$1 user=$2; shift 2
mkdir -p "$root/models" "$root/dev/shm"
mount --bind "$root" "$root"
mount --bind -o ro "$MODELS" "$root/models"
mount -o remount,bind,ro "$root/models"
mount -t proc proc "$root/proc"
mount -t tmpfs -o size=64m,mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups --no-new-privs \\
    --bounding-set=-all env -i "$@"
"""


@dataclass(frozen=True)
class Image:
    """A built stage.

    Attributes:
        root: Its files.
        env: Environment of its processes.
        directory: Their working directory.
        user: Their user and group, as numbers.
        entry_point: The words that each start begins with.
        command: The words behind them unless others are given.
        health_check: The command that tells whether it is healthy.
    """

    root: Path
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin"})
    directory: str = "/"
    user: str = "0:0"
    entry_point: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health_check: tuple[str, ...] = ()

    def start(self, models: Path, words: Sequence[str], **settings: object) -> subprocess.Popen[bytes]:
        """Starts a container with a repository at ``/models``; settings are those of `Popen`.

        The container's first process is the only child of the process returned; see `first_process`.
        """
        argv = [*_NEW_NAMESPACES, "sh", "-c", _CONTAINER, "sh", str(self.root), self.user]
        argv += [*self._environment(), *self.entry_point, *(words or self.command)]
        outside = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "MODELS": str(models)}
        return subprocess.Popen(argv, env=outside, **settings)  # type: ignore[call-overload,no-any-return]

    def is_healthy(self, pid: int) -> bool:
        """Runs the health check in the container whose first process this is."""
        user, group = self.user.split(":")
        inside = ["nsenter", f"--target={pid}", "--mount", "--pid", f"--root=/proc/{pid}/root"]
        inside += ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "env", "-i"]
        inside += [*self._environment(), *self.health_check]
        return subprocess.run(inside, capture_output=True, check=False).returncode == 0

    def _environment(self) -> list[str]:
        return [f"--chdir={self.directory}", *(f"{name}={value}" for name, value in self.env.items())]


class Builder:
    """Builds the last stage of a Dockerfile.

    Args:
        file: The Dockerfile.
        context: The directory that it copies from; its `.dockerignore` names what may be copied.
        base: The files of what the first stage is from, whatever the file says.
        packages: Python packages for pip, in place of an index.
        at: Directory in which the stages are built.
    """

    def __init__(self, file: Path, context: Path, base: Path, packages: Path, at: Path) -> None:
        self._file = file
        self._context = context
        self._base = base
        self._packages = packages
        self._at = at
        self._stages: dict[str, Image] = {}
        ignore = (context / ".dockerignore").read_text().split()
        self._allowed = {line[1:] for line in ignore if line.startswith("!")}

    def build(self, **arguments: str) -> Image:
        """Builds it with these build arguments, and removes the other stages."""
        defaults: dict[str, str] = {}  # arguments before the first stage
        known = defaults
        for word, rest in _instructions(self._file.read_text()):
            if word == "ARG":
                name, _, value = rest.partition("=")
                known[name] = arguments.get(name, value)
            elif word == "FROM":
                image = self._from(_substituted(rest, defaults).split())
                known = {}
            else:
                image = self._step(image, known, word, rest)
                self._stages[image.root.name] = image
        for stage in self._stages.values():
            if stage.root != image.root:
                shutil.rmtree(stage.root)
        return image

    def _from(self, words: list[str]) -> Image:
        name = words[2] if words[1:2] == ["AS"] else "last"
        stage = self._stages.get(words[0], Image(self._base))
        root = self._at / name
        subprocess.run(["cp", "-a", "--reflink=auto", str(stage.root), str(root)], check=True)
        return replace(stage, root=root)

    def _step(self, image: Image, known: Mapping[str, str], word: str, rest: str) -> Image:
        variables = {**known, **image.env}
        if word == "RUN":
            self._run(image, variables, rest)
        elif word == "COPY":
            self._copy(image, _substituted(rest, variables).split())
        elif word == "ENV":
            given = dict(each.split("=", 1) for each in _substituted(rest, variables).split())
            return replace(image, env={**image.env, **given})
        elif word == "WORKDIR":
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            return replace(image, directory=rest)
        elif word == "USER":
            return replace(image, user=rest)
        elif word == "ENTRYPOINT":
            return replace(image, entry_point=tuple(json.loads(rest)))
        elif word == "CMD":
            return replace(image, command=tuple(json.loads(rest)))
        elif word == "HEALTHCHECK":
            return replace(image, health_check=tuple(json.loads(rest[rest.index("CMD") + 3 :])))
        else:
            assert word == "EXPOSE", f"{self._file}: {word} is not known here"
        return image

    def _run(self, image: Image, variables: Mapping[str, str], shell: str) -> None:
        # pip's configuration belongs to where the image is built.
        variables = {**variables, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/packages", "HOME": "/root"}
        command = ["env", "-i", f"--chdir={image.directory}", *(f"{k}={v}" for k, v in variables.items())]
        argv = [*_NEW_NAMESPACES, "sh", "-c", _STEP, "sh", str(image.root), str(self._packages)]
        done = subprocess.run(
            [*argv, *command, "/bin/sh", "-c", shell], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"RUN {shell}\n{done.stdout}{done.stderr}"

    def _copy(self, image: Image, words: list[str]) -> None:
        source = self._context
        if words[0].startswith("--from="):
            source = self._stages[words.pop(0).removeprefix("--from=")].root
        *names, to = words
        target = image.root / Path(image.directory, to).as_posix().lstrip("/")
        for name in names:
            assert source != self._context or name in self._allowed, f"{name} is not in .dockerignore"
            path = source / name.lstrip("/")
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__") if source == self._context else None
                shutil.copytree(path, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                place = target / path.name if to.endswith("/") or len(names) > 1 else target
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)


def first_process(container: subprocess.Popen[bytes]) -> int | None:
    """The process id of a container's first process; None once it has ended."""
    try:
        children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def kill(container: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a container, which end with its first one."""
    first = first_process(container)
    if first is not None:
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
    container.wait()


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    whole = ""
    for line in lines:
        whole += line.removesuffix("\\")
        if not line.endswith("\\"):
            word, _, rest = whole.strip().partition(" ")
            yield word, rest.strip()
            whole = ""


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def refusal(base: Path) -> str:
    """Reason for which images can't be built and run here; empty if they can."""
    if not base.is_dir():
        return "there is no base: tests/setup_image.sh makes it"
    script = 'mount -t tmpfs none /mnt && mount --bind /mnt /mnt && exec chroot "$1" true'
    try:
        done = subprocess.run(
            [*_NEW_NAMESPACES, "sh", "-c", script, "sh", str(base)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
