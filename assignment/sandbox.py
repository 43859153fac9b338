"""What a student's process may do: read Python's files and its own, and compute.

All of this is called in a process that has just been forked, and holds for all that it
runs from then on. Four mechanisms of Linux do it, and none of them needs root:

- prctl: the process ends when the grader does, however that ends,
- limits on CPU seconds, memory and the size of a file (setrlimit),
- Landlock, for files: everything is closed but the folders that are named,
- a seccomp filter, for the rest: no new process, signal, socket or change of ownership.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# Numbers of system calls on x86-64.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
FORBIDDEN = [
    *(56, 57, 58, 435),  # clone, fork, vfork, clone3: processes, and threads
    *(59, 322),  # execve, execveat
    # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
    *(62, 200, 234, 129, 297, 424),
    *(41, 53, 425),  # socket, socketpair, io_uring_setup
    *(101, 310, 311, 438),  # ptrace, process_vm_readv and -writev, pidfd_getfd
    # chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown, fchownat
    *(90, 91, 268, 452, 92, 93, 94, 260),
    *(132, 235, 261, 280),  # utime, utimes, futimesat, utimensat
    *(188, 189, 190, 197, 198, 199),  # setxattr, removexattr and their forms
    *(141, 144, 203, 160, 302),  # priorities, the scheduler, setrlimit, prlimit
    *(272, 308, 165, 166, 161),  # unshare, setns, mount, umount, chroot
]

# Landlock's rights: bit 0 is to execute, 2 to read a file, 3 to list a folder.
READ_FILE = 1 << 0 | 1 << 2
READ_FOLDER = READ_FILE | 1 << 3

# Berkeley packet filter: load a word, compare it, return.
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, NOT_PERMITTED = 0x7FFF0000, 0x00050000 | 1  # EPERM
X86_64 = 0xC000003E
X32_NUMBERS = 0x40000000  # the same system calls by other numbers


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


def end_with_parent() -> None:
    """This process is killed when the one that started it ends, even by a signal."""
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PDEATHSIG")


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Beyond these the process gets a signal or an error, and nobody else does."""
    # A signal first (SIGXCPU), whose handler can tell where the code was, then the end.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def close_files(readable: Iterable[Path]) -> None:
    """No file can be opened any more but those below `readable`, and these to read."""
    # Version 1 knows 13 rights, 2 and 3 one more each; later ones are not of files.
    handled = (1 << 12 + min(landlock_version(), 3)) - 1
    rules = LIBC.syscall(LANDLOCK_CREATE_RULESET, struct.pack("Q", handled), 8, 0)
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
    number_offset, architecture_offset = 0, 4
    # (code, instructions to skip if true, if false, operand)
    instructions = [
        (LOAD, 0, 0, architecture_offset),
        (JUMP_IF_EQUAL, 1, 0, X86_64),
        (RETURN, 0, 0, NOT_PERMITTED),
        (LOAD, 0, 0, number_offset),
        (JUMP_IF_AT_LEAST, 0, 1, X32_NUMBERS),
        (RETURN, 0, 0, NOT_PERMITTED),
    ]
    for number in FORBIDDEN:
        instructions.append((JUMP_IF_EQUAL, 0, 1, number))
        instructions.append((RETURN, 0, 0, NOT_PERMITTED))
    instructions.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *each) for each in instructions)


def filter_system_calls() -> None:
    """Nothing that reaches other processes, the network or the owners of files."""
    program = filter_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    mode_filter = 2
    checked(LIBC.prctl(PR_SET_SECCOMP, mode_filter, header, 0, 0), "seccomp")


def enclose(readable: Iterable[Path]) -> None:
    """Close this process in, for good. OSError where the kernel cannot."""
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    close_files(readable)
    filter_system_calls()
