"""What a student's process may do: read Python's files and its own, and compute.

All of this is called in a process that has just been forked, and holds for all that it
runs from then on. Linux on x86-64 does it, and none of it needs root:

- prctl: the process ends when the grader does, however that ends,
- limits on CPU seconds, memory and the size of a file (setrlimit),
- Landlock, for files: everything is closed but the folders that are named,
- a seccomp filter: no system call but those that computing and reading take.

Where the grader is root, the process becomes the user nobody first.
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

ROOT = Path(__file__).resolve().parents[1]
# What Python and torch are made of. The student's folder is added for each job.
SYSTEM = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
PYTHON = [sys.prefix, sys.base_prefix]
NOBODY = 65534

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# Numbers of system calls on x86-64.
CAPSET = 126
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
# None of these reaches another process, or leaves anything behind.
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
# openat is allowed with none of these among its flags, which are its argument 2.
OPENAT, FLAGS = 257, 2
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Landlock's rights: bit 0 is to execute, 2 to read a file, 3 to list a folder.
READ_FILE = 1 << 0 | 1 << 2
READ_FOLDER = READ_FILE | 1 << 3
# Its scopes, from version 6 on: bit 0 is abstract sockets, 1 signals.
SCOPES = 1 << 0 | 1 << 1

# Berkeley packet filter: load a word, compare it, return.
LOAD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, NOT_PERMITTED = 0x7FFF0000, 0x00050000 | 1  # EPERM
X86_64 = 0xC000003E


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 or less where it has none."""
    ask_for_version = 1
    return LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, ask_for_version)


def is_open_to_others(path: Path) -> bool:
    """Whether a user who owns nothing can read this folder."""
    folders = [path, *path.parents]
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)


def why_not() -> str:
    """Why this machine cannot enclose a student's process; empty if it can."""
    if platform.machine() != "x86_64":
        return "foreign code is enclosed on x86-64 alone"
    is_root, has_landlock = os.geteuid() == 0, landlock_version() >= 1
    if not is_root:
        return "" if has_landlock else "this kernel has no Landlock (Linux 5.13)"
    for path in PYTHON:
        if not is_open_to_others(Path(path)):
            return (
                f"as root it runs the code as the user nobody, who cannot read {path}: "
                "start it as another user"
            )
    # Without Landlock the owners of files decide who reads the reference.
    if not has_landlock and is_open_to_others(ROOT):
        return f"this kernel has no Landlock: close the reference (chmod 700 {ROOT})"
    return ""


def checked(result: int, what: str) -> int:
    """The result of a call of libc; OSError where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def end_with_parent() -> None:
    """This process is killed when the one that started it ends, even by a signal."""
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PDEATHSIG")


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Beyond these the process gets a signal or an error, and nobody else does.

    memory_bytes come on top of the address space that it has: torch alone reserves
    more of it than a student needs, and with CUDA 10 GB.
    """
    # A signal first (SIGXCPU), whose handler can tell where the code was, then the end.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory_bytes += pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    # If the machine has less memory, it is this process that the kernel ends.
    Path("/proc/self/oom_score_adj").write_text("1000")


def close_files(readable: Iterable[Path]) -> None:
    """No file can be opened any more but those below `readable`, and these to read."""
    version = landlock_version()
    # Version 1 knows 13 rights, 2 and 3 one more each; later ones are not of files.
    handled = (1 << 12 + min(version, 3)) - 1
    # The rights on files, on the network, and the scopes: older kernels take zeros.
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
    """The seccomp filter, as instructions of eight bytes each."""
    number, architecture, arguments = 0, 4, 16  # where they are
    # (code, instructions to skip if true, if false, operand)
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
    """No system call but those of computing and reading: others are not permitted."""
    program = filter_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    mode_filter = 2
    checked(LIBC.prctl(PR_SET_SECCOMP, mode_filter, header, 0, 0), "seccomp")


def drop_privileges(become_nobody: bool) -> None:
    """No capability is left, and with `become_nobody` no user either."""
    if become_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    version_3, this_process = 0x20080522, 0
    header = struct.pack("=Ii", version_3, this_process)
    checked(LIBC.syscall(CAPSET, header, bytes(24)), "capset")


def enclose(folder: str, become_nobody: bool) -> None:
    """Close this process in with a student's folder, for good.

    Raises OSError where the kernel cannot.
    """
    drop_privileges(become_nobody)
    # After the change of user, which undoes it.
    end_with_parent()
    # No memory image on disk after a crash.
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if landlock_version() >= 1:
        readable = [Path(path) for path in [*SYSTEM, *PYTHON, folder]]
        close_files([path for path in readable if path.exists()])
    filter_system_calls()
