"""Restricts a student's process to computing and to reading libraries and its files.

The functions are called in a process that has just been forked, and they bind it for
the rest of its life. They work on x86-64 Linux, also without root:

- prctl ends the process when the grader ends, for whatever reason,
- setrlimit limits its CPU seconds, its memory and the size of the files that it writes,
- Landlock closes all files except those in the folders that are listed here,
- a seccomp filter denies all system calls except those for computing and reading.

If the grader runs as root, the process first becomes the user nobody.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

# Python and its packages need these. The student's folder is added for each job.
SYSTEM_FILES = ["/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
LIBRARIES = [
    Path(prefix, name)
    for prefix in ("/", "/usr", "/usr/local", sys.base_prefix, sys.prefix)
    for name in ("lib", "lib64")
]
NOBODY = 65534

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# Numbers of system calls on x86-64.
CAPSET = 126
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
# None of these reaches another process or leaves anything behind.
ALLOWED = [
    *(0, 1, 3, 8, 17, 19, 20),  # read, write, close, lseek, pread64, readv, writev
    *(4, 5, 6, 262, 332),  # stat, fstat, lstat, newfstatat, statx
    *(21, 269, 439),  # access, faccessat, faccessat2
    *(79, 89, 267, 217),  # getcwd, readlink, readlinkat, getdents64
    *(9, 10, 11, 12, 25, 28),  # mmap, mprotect, munmap, brk, mremap, madvise
    *(13, 14, 15, 131),  # rt_sigaction, rt_sigprocmask, rt_sigreturn, sigaltstack
    *(24, 202, 7, 23),  # sched_yield, futex, poll, select
    *(35, 230, 219),  # nanosleep, clock_nanosleep, restart_syscall
    *(96, 201, 228, 229),  # gettimeofday, time, clock_gettime, clock_getres
    *(39, 110, 186),  # getpid, getppid, gettid
    *(102, 104, 107, 108),  # getuid, getgid, geteuid, getegid
    *(63, 98, 99, 204, 309, 318),  # uname, getrusage, sysinfo, affinity, CPU, getrandom
    *(60, 231),  # exit, exit_group
]
# openat is allowed unless its flags, which are its argument 2, contain one of these.
OPENAT, FLAGS = 257, 2
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Landlock's rights: bit 0 executes a file, bit 2 reads one, and bit 3 lists a folder.
READ_FILE = 1 << 0 | 1 << 2
READ_FOLDER = READ_FILE | 1 << 3
# Its scopes, from version 6 on: bit 0 is for abstract sockets, bit 1 for signals.
SCOPES = 1 << 0 | 1 << 1

# Instructions of the Berkeley packet filter: load a word, compare it, return.
LOAD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, NOT_PERMITTED = 0x7FFF0000, 0x00050000 | 1  # EPERM
X86_64 = 0xC000003E


def landlock_version() -> int:
    """Return the kernel's version of Landlock, or 0 or less if it has none."""
    ask_for_version = 1
    return LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, ask_for_version)


def is_open_to_others(path: Path) -> bool:
    """Return whether a user who owns nothing can open files below this path by name."""
    return all(folder.stat().st_mode & 0o001 for folder in [path, *path.parents])


def refusal(private: Iterable[Path]) -> str:
    """Return why this machine cannot run a student's code safely; "" if it can.

    `private` are the folders that the code must not read.
    """
    if platform.machine() != "x86_64":
        return "the enclosure for other people's code needs an x86-64 processor"
    is_root, has_landlock = os.geteuid() == 0, landlock_version() >= 1
    if not is_root and not has_landlock:
        return "this kernel has no Landlock, which Linux has from 5.13 on"
    libraries = [path.resolve() for path in LIBRARIES if path.exists()]
    if is_root:
        for path in libraries:
            if not is_open_to_others(path):
                return (
                    "the grader runs as root, so the code runs as the user nobody, who "
                    f"cannot read {path}: start the grader as another user"
                )
    for path in (path.resolve() for path in private):
        for library in libraries:
            if path.is_relative_to(library):
                return f"the code could read {path}, which is in {library}: move it"
        # Without Landlock the permissions of files decide who reads them.
        if not has_landlock and is_open_to_others(path):
            return f"this kernel has no Landlock: close the folder (chmod 700 {path})"
    return ""


def checked(result: int, what: str) -> int:
    """Return the result of a call to libc. Raises OSError if the call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def end_with_parent() -> None:
    """Have this process killed as soon as its parent ends, even if by a signal."""
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PDEATHSIG")


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Limit what this process uses; beyond that it gets a signal or an error.

    memory_bytes is what it may use on top of its present address space, because torch
    alone reserves more than a student needs (with CUDA 10 GB).
    """
    # SIGXCPU comes first, so that a handler can tell where the code was. SIGKILL
    # comes a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory_bytes += pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    # If the machine runs out of memory, the kernel kills this process and no other.
    Path("/proc/self/oom_score_adj").write_text("1000")


def close_files(readable: Iterable[Path]) -> None:
    """Let this process open only files below `readable`, and only to read them."""
    version = landlock_version()
    # Version 1 has 13 rights on files, and versions 2 and 3 add one each.
    handled = (1 << 12 + min(version, 3)) - 1
    # Rights on files, rights on the network, and scopes, which are 0 for older kernels.
    attributes = struct.pack("=QQQ", handled, 0, SCOPES if version >= 6 else 0)
    rules = LIBC.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    checked(rules, "Landlock")
    for path in readable:
        rights = READ_FOLDER if path.is_dir() else READ_FILE
        opened = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights, opened)
        path_beneath = 1
        added = LIBC.syscall(LANDLOCK_ADD_RULE, rules, path_beneath, rule, 0)
        checked(added, f"Landlock, {path}")
        os.close(opened)
    checked(LIBC.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def filter_program() -> bytes:
    """Return the seccomp filter, as instructions of eight bytes each."""
    number, architecture, arguments = 0, 4, 16  # byte offsets in the data it reads
    # Code, instructions to skip if true, instructions to skip if false, operand.
    instructions = [
        (LOAD, 0, 0, architecture),
        (JUMP_IF_EQUAL, 1, 0, X86_64),
        (RETURN, 0, 0, NOT_PERMITTED),
        (LOAD, 0, 0, number),
    ]
    for allowed in ALLOWED:
        instructions.append((JUMP_IF_EQUAL, 0, 1, allowed))
        instructions.append((RETURN, 0, 0, ALLOW))
    instructions += [
        (JUMP_IF_EQUAL, 0, 3, OPENAT),
        (LOAD, 0, 0, arguments + 8 * FLAGS),
        (JUMP_IF_ANY_BIT, 1, 0, WRITING),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, NOT_PERMITTED),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def filter_system_calls() -> None:
    """Deny this process all system calls except those for computing and reading."""
    program = filter_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    mode_filter = 2
    checked(LIBC.prctl(PR_SET_SECCOMP, mode_filter, header, 0, 0), "seccomp")


def drop_privileges(become_nobody: bool) -> None:
    """Give up all capabilities and, with `become_nobody`, the user and group too."""
    if become_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    version_3, this_process = 0x20080522, 0
    header = struct.pack("=Ii", version_3, this_process)
    checked(LIBC.syscall(CAPSET, header, bytes(24)), "capset")


def enclose(folder: str, become_nobody: bool) -> None:
    """Enclose this process for good; it can still read a student's folder.

    Raises OSError if the kernel refuses.
    """
    drop_privileges(become_nobody)
    # This comes after the change of user, which would undo it.
    end_with_parent()
    # A crash must not leave an image of the memory on the disk.
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if landlock_version() >= 1:
        readable = [*LIBRARIES, *map(Path, SYSTEM_FILES), Path(folder)]
        close_files([path for path in readable if path.exists()])
    filter_system_calls()
