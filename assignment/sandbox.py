"""What a student's process may do: read Python's files and its own, and compute.

`enclose` is called in a process that has just been forked, and holds for all that it
runs from then on. Three mechanisms of Linux do it, and none of them needs root:

- limits on CPU seconds, memory and the size of a file (setrlimit),
- Landlock, for files: everything is closed but the folders that are named,
- a seccomp filter, for the rest: no new process, signal, socket or change of ownership.
"""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)

# Numbers of system calls on x86-64.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
CLONE = 56
CLONE3 = 435
FORBIDDEN = {
    "new processes": [57, 58, 59, 322],  # fork, vfork, execve, execveat
    # kill, tkill, rt_sigqueueinfo, tgkill, rt_tgsigqueueinfo, pidfd_send_signal
    "signals": [62, 200, 129, 234, 297, 424],
    "sockets, also by io_uring": [41, 53, 425],  # socket, socketpair, io_uring_setup
    # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
    "other processes": [101, 310, 311, 438],
    # chmod, fchmod, chown, fchown, lchown, fchownat, fchmodat, fchmodat2
    "modes and owners": [90, 91, 92, 93, 94, 260, 268, 452],
    # utime, utimes, futimesat, utimensat, set- and removexattr in three forms each
    "times and attributes": [132, 235, 261, 280, 188, 189, 190, 197, 198, 199],
    "priorities and limits": [141, 144, 203, 160, 302],  # of this or other processes
    "namespaces and mounts": [272, 308, 165, 166, 161],
}

# Landlock's rights: bit 0 is to execute, 2 to read a file, 3 to list a folder.
READ = 1 << 0 | 1 << 2 | 1 << 3
ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1}  # by version
ALL_RIGHTS_SINCE_3 = (1 << 15) - 1

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

# Berkeley packet filter: load a word, compare, test bits, return.
LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
JUMP_IF_SET = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
NOT_PERMITTED = 0x00050000 | 1  # EPERM
NOT_IMPLEMENTED = 0x00050000 | 38  # ENOSYS
KILL = 0x80000000
X86_64 = 0xC000003E
CLONE_THREAD = 0x10000


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 or less where it has none."""
    ask_for_version = 1
    return LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, ask_for_version)


def is_available() -> bool:
    """Whether this machine can enclose a student's process."""
    return platform.machine() == "x86_64" and landlock_version() >= 1


def checked(result: int, what: str) -> int:
    """The result of a call of libc; OSError where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Beyond these the process gets a signal or an error, and nobody else does."""
    # A signal first (SIGXCPU), whose handler can tell where the code was, then the end.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def close_files(readable: Iterable[Path]) -> None:
    """No file can be opened any more but those below `readable`, and these to read."""
    handled = ALL_RIGHTS.get(landlock_version(), ALL_RIGHTS_SINCE_3)
    attributes = struct.pack("Q", handled)
    rules = checked(
        LIBC.syscall(LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0),
        "Landlock",
    )
    for path in readable:
        folder = os.open(path, os.O_PATH)
        rights = READ if path.is_dir() else READ & ~(1 << 3)
        rule = struct.pack("=Qi", rights, folder)
        path_beneath = 1
        checked(
            LIBC.syscall(LANDLOCK_ADD_RULE, rules, path_beneath, rule, 0), "Landlock"
        )
        os.close(folder)
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    checked(LIBC.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def filter_program() -> bytes:
    """The seccomp filter, as instructions of eight bytes each."""
    number_offset, architecture_offset, first_argument_offset = 0, 4, 16
    x32_numbers = 0x40000000  # the same system calls by other numbers
    # (code, instructions to skip if true, if false, operand)
    instructions = [
        (LOAD, 0, 0, architecture_offset),
        (JUMP_IF_EQUAL, 1, 0, X86_64),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, number_offset),
        (JUMP_IF_AT_LEAST, 0, 1, x32_numbers),
        (RETURN, 0, 0, NOT_PERMITTED),
        # A C library that finds no clone3 takes clone, whose flags a filter can see.
        (JUMP_IF_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, NOT_IMPLEMENTED),
    ]
    for numbers in FORBIDDEN.values():
        for number in numbers:
            instructions.append((JUMP_IF_EQUAL, 0, 1, number))
            instructions.append((RETURN, 0, 0, NOT_PERMITTED))
    # A thread is not a new process.
    instructions += [
        (JUMP_IF_EQUAL, 0, 3, CLONE),
        (LOAD, 0, 0, first_argument_offset),
        (JUMP_IF_SET, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, NOT_PERMITTED),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def filter_system_calls() -> None:
    """Nothing that reaches other processes, the network or the owners of files."""
    program = filter_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    checked(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def enclose(
    readable: Iterable[Path], cpu_seconds: int, memory_bytes: int, file_bytes: int
) -> None:
    """Close this process in, for good. OSError where the kernel cannot."""
    limit(cpu_seconds, memory_bytes, file_bytes)
    close_files(readable)
    filter_system_calls()
