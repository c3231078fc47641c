"""Gives up rights and starts a program: ``sandbox.py FD LAYERS PROGRAM [ARGUMENT...]``.

The program has no network, opens no file for writing, changes no name, mode or owner of a file, starts and
signals no other process, leaves no process group, and gets none of this back. Two layers do so. A seccomp
filter refuses the system calls by themselves; Landlock, where the kernel has it, has the
kernel's file system refuse each change, also by calls that the filter does not know. LAYERS is
``landlock,seccomp``, or one of them.

Writes the names of the layers to the file descriptor FD, as a line of JSON, before it starts the program.
Ends with `UNAVAILABLE` and a text on stderr if a layer that is needed is not available. Imports the standard
library only, and takes the filter's compiler from libseccomp, which has the numbers of system calls of all
processors.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator

UNAVAILABLE = 77
"""Exit code where a layer is missing."""

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # on all processors
_LANDLOCK_VERSION = 1
_RIGHTS_BY_ABI = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
"""Landlock's rights on files by its version; 0xFFFF in later ones."""
_READS = 0b1101
"""To execute, to read files, and to read directories."""
_TCP = 0b11
_SCOPES = 0b11
"""Abstract Unix sockets, and signals."""

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NE, _MASKED_EQ = 1, 7
_LAST_KNOWN, _END = 469, 600
"""The newest system call that the lists below judge, and the number up to which others are refused."""

_REFUSED = (
    *("fork", "vfork", "socket", "connect", "bind", "listen", "accept", "accept4", "io_uring_setup"),
    *("creat", "open_by_handle_at", "truncate", "mkdir", "mkdirat", "mknod", "mknodat", "rmdir"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "link", "linkat", "symlink", "symlinkat"),
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
    *("utime", "utimes", "utimensat", "futimesat", "mq_open", "mq_unlink", "shmget", "msgget", "semget"),
    *("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal", "pidfd_getfd"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "migrate_pages"),
    *(
        "setsid",
        "setpgid",
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "setns",
        "unshare",
        "move_mount",
        "open_tree",
        "fsopen",
    ),
    *("fsconfig", "fsmount", "fspick", "mount_setattr", "bpf", "perf_event_open", "userfaultfd", "keyctl"),
    *("add_key", "request_key", "init_module", "finit_module", "delete_module", "kexec_load"),
    *("kexec_file_load", "reboot", "swapon", "swapoff", "sethostname", "setdomainname", "settimeofday"),
    *("clock_settime", "clock_adjtime", "adjtimex", "iopl", "ioperm", "acct", "quotactl", "quotactl_fd"),
    *("syslog", "vhangup", "fanotify_init", "lookup_dcookie", "uselib", "modify_ldt"),
)
_REFUSED_NUMBERS = (452, 463, 466, 467, 469)
"""Fchmodat2, setxattrat, removexattrat, open_tree_attr, file_setattr: newer than libseccomp 2.5."""
_ABSENT = ("openat2", "clone3")
"""Calls whose flags a filter can't read; their callers fall back to the older ones."""
_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = (0x80, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)


class MissingError(Exception):
    """A layer is not available; the text says which, and why."""


class _Compare(ctypes.Structure):
    """`struct scmp_arg_cmp` of libseccomp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


class _Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def main(arguments: list[str]) -> int:
    """Runs the program in the sandbox; returns if that is not possible."""
    report, layers, command = int(arguments[0]), arguments[1].split(","), arguments[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _volunteer_for_oom()
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    try:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise MissingError(f"the kernel refuses PR_SET_NO_NEW_PRIVS: {_reason()}")
        names = _confine(libc, layers)
    except MissingError as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    os.write(report, json.dumps({"layers": names}).encode() + b"\n")
    os.set_inheritable(report, True)
    os.execv(command[0], command)


def _confine(libc: ctypes.CDLL, layers: list[str]) -> list[str]:
    names = []
    abi = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if "landlock" in layers and abi > 0:
        _restrict_files(libc, abi)
        names.append(f"Landlock (ABI {abi})")
    if "seccomp" in layers:
        _filter_calls()
        names.append("seccomp")
    if not names:
        raise MissingError("no layer of the sandbox is available")
    return names


def _restrict_files(libc: ctypes.CDLL, abi: int) -> None:
    """Has Landlock refuse all changes of files: a ruleset without rules allows none of what it handles."""
    rights = _RIGHTS_BY_ABI.get(abi, 0xFFFF) & ~_READS
    ruleset = _Ruleset(rights, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    file = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if file < 0 or libc.syscall(_LANDLOCK_RESTRICT_SELF, file, 0):
        raise MissingError(f"Landlock can't be used: {_reason()}")
    os.close(file)


def _filter_calls() -> None:
    """Loads the seccomp filter into the kernel."""
    calls = _CallFilter()
    for name in _REFUSED:
        calls.refuse(name)
    for number in _REFUSED_NUMBERS:
        calls.refuse_number(number, errno.EPERM)
    for name in _ABSENT:
        calls.refuse(name, reason=errno.ENOSYS)
    for number in range(_LAST_KNOWN + 1, _END):
        calls.refuse_number(number, errno.ENOSYS)
    for name, place in (("open", 1), ("openat", 2)):
        for compare in _opens_for_writing(place):
            calls.refuse(name, compare)
    for flag in _NEW_NAMESPACES:
        calls.refuse("clone", _Compare(0, _MASKED_EQ, flag, flag))
    calls.refuse("clone", _Compare(0, _MASKED_EQ, _CLONE_THREAD, 0))
    calls.refuse("tgkill", _Compare(0, _NE, os.getpid(), 0))
    calls.refuse("prlimit64", _Compare(0, _NE, 0, 0))
    calls.load()


class _CallFilter:
    """A filter of libseccomp."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        except OSError as error:
            raise MissingError(
                "libseccomp.so.2 can't be loaded, which makes the filter of system calls; install it, as "
                f"`apt install libseccomp2` does: {error}"
            ) from None
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def refuse(self, name: str, *compares: _Compare, reason: int = errno.EPERM) -> None:
        """Refuses a call whose arguments compare so, if this processor has the call."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            self.refuse_number(number, reason, *compares)

    def refuse_number(self, number: int, reason: int, *compares: _Compare) -> None:
        """Refuses a call by its number."""
        array = (_Compare * len(compares))(*compares)
        action = ctypes.c_uint32(_ERRNO | reason)
        code = self._library.seccomp_rule_add_array(
            self._context, action, number, ctypes.c_uint(len(compares)), array
        )
        if code:
            raise MissingError(f"libseccomp refuses a rule of system call {number}: {os.strerror(-code)}")

    def load(self) -> None:
        """Gives the filter to the kernel, for good."""
        code = self._library.seccomp_load(self._context)
        if code:
            raise MissingError(f"the kernel refuses a seccomp filter: {os.strerror(-code)}")
        self._library.seccomp_release(self._context)


def _opens_for_writing(place: int) -> Iterator[_Compare]:
    for access in (os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
        yield _Compare(place, _MASKED_EQ, os.O_ACCMODE, access)
    for flag in (os.O_CREAT, os.O_TRUNC):
        yield _Compare(place, _MASKED_EQ, flag, flag)


def _volunteer_for_oom() -> None:
    """Has the kernel end this process first if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
