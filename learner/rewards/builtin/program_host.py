"""Run one program that a model wrote, confined.

This script runs in a fresh interpreter and imports only the standard library.

    program_host.py IN OUT REPORT PROBLEM    four open files, and the order as JSON on standard input
    order ─▶ isolate ─▶ enter ─▶ give_up ─▶ program, reads IN, writes OUT ─▶ its tests ─▶ token, into REPORT

Invariant: from its first line, the program sees no process but its own and no network. Its only files are the
read-only ones of the interpreter and a folder in memory. It has no capabilities, and everything it starts
ends with this process. If the kernel or container does not allow this, PROBLEM holds the error and the program
does not run. PROBLEM is closed before a program runs, so no program can fake an error. Linux only.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types

# Constants of prctl(2), unshare(2), mount(2), umount2(2) and mount_setattr(2).
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x2_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000
NO_DEVICES_OR_SETUID, BIND, RECURSIVE, PRIVATE, DETACH = 0x6, 0x1000, 0x4000, 0x4_0000, 0x2
SET_MOUNT_ATTRIBUTES, READ_ONLY, AT_WORKING_DIRECTORY, AT_RECURSIVE = 442, 0x1, -100, 0x8000
CAPABILITIES_VERSION = 0x2008_0522

SEEN = (
    "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/dev/null",
    "/dev/zero", "/dev/urandom",
    *(path(prefix) for prefix in (sys.prefix, sys.base_prefix) for path in (str, os.path.realpath)),
)  # fmt: skip
FOLDER = "/program"
MAX_FOLDER_MIB, MAX_FILE_MIB, MAX_OPEN_FILES, MAX_PROCESSES = 64, 16, 128, 32
FIRST_USER = 1 << 20
"""Base of unused user ids for programs under root. Root itself has no process limit."""

libc = ctypes.CDLL(None, use_errno=True)


def main(given: str, out: str, report: str, problem: str) -> None:
    """Read the order and run it."""
    order = json.load(sys.stdin)
    is_confined = not order["unconfined"]
    try:
        end_with_parent(order["parent"])
        if is_confined:
            isolate()
            enter(order["folder"])
        limit(order["max_memory_mib"], order["timeout_s"], is_confined=is_confined)
        if is_confined:
            give_up(FIRST_USER + order["parent"])
    except OSError as error:
        os.write(int(problem), str(error).encode())
        return
    os.close(int(problem))
    for ours, theirs in ((int(given), 0), (int(out), 1), (os.open(os.devnull, os.O_WRONLY), 2)):
        os.dup2(ours, theirs)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape")
    sys.argv = ["program.py"]
    if order["tests"] is None:
        os.close(int(report))
        exec(compile(order["program"], "program.py", "exec"), named("__main__"))  # noqa: S102  what this process is for
    else:
        test(order["program"], order["tests"], int(report), order["token"].encode())


def test(program: str, tests: str, report: int, token: bytes) -> None:
    """Report the token if both the program and its tests run to the end.

    The program runs as a module, so its `__main__` code does not run.
    """
    # Bound before the program can replace these names.
    run, write, leave, names = exec, os.write, os._exit, named("program")
    try:
        tests_code = compile(tests, "tests.py", "exec")
        run(compile(program, "program.py", "exec"), names)
        run(tests_code, names)
    except BaseException:  # any exception is a failure
        leave(1)
    else:
        write(report, token)
        leave(0)


def named(name: str) -> dict[str, object]:
    """Return the namespace of a new module, which dataclasses and pickle look up."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends."""
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if parent not in (None, os.getppid()):  # it has already ended
        os._exit(1)


def isolate() -> None:
    """Continue as a process that sees no network and no process but its children.

    Its children end with it.

    Raises:
        OSError: The kernel refuses.
    """
    user, group = os.getuid(), os.getgid()
    alone = NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    if libc.unshare(alone) != 0:  # only root may do this outside a new user namespace
        called("unshare", alone | NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    # Process 1 of a namespace ignores signals of its own children, so the program runs as its child.
    for _ in range(2):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        end_with_parent()


def enter(root: str) -> None:
    """Make the empty folder `root` the root file system, holding what Python needs.

    Raises:
        OSError: The kernel refuses.
    """
    called("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    called("mount", b"tmpfs", root.encode(), b"tmpfs", NO_DEVICES_OR_SETUID, b"size=1m,mode=755")
    os.umask(0o022)
    for path in sorted(SEEN, key=len):  # one may lie in another
        show(path, root + path)
    os.mkdir(root + FOLDER)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    called(
        "syscall",
        SET_MOUNT_ATTRIBUTES,
        AT_WORKING_DIRECTORY,
        root.encode(),
        AT_RECURSIVE,
        attributes,
        ctypes.c_size_t(32),
    )
    size = f"size={MAX_FOLDER_MIB}m,mode=777".encode()
    called("mount", b"tmpfs", (root + FOLDER).encode(), b"tmpfs", NO_DEVICES_OR_SETUID, size)
    os.chdir(root)
    called("pivot_root", b".", b".")
    called("umount2", b".", DETACH)
    os.chdir(FOLDER)
    os.environ |= {"HOME": FOLDER, "TMPDIR": FOLDER}


def show(path: str, target: str) -> None:
    if not os.path.exists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    called("mount", path.encode(), target.encode(), None, BIND | RECURSIVE, None)


def limit(max_memory_mib: int, timeout_s: float, *, is_confined: bool) -> None:
    """Set resource limits, which apply per process except for the number of processes."""
    limits = {
        resource.RLIMIT_AS: max_memory_mib << 20,
        resource.RLIMIT_CPU: int(timeout_s) + 1,
        resource.RLIMIT_FSIZE: MAX_FILE_MIB << 20,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if is_confined:  # otherwise all processes of this user on the machine count
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def give_up(user: int) -> None:
    """Drop all capabilities for good and, under root, switch to an unused user id.

    Raises:
        OSError: The kernel refuses.
    """
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    called("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    called("capset", header, none)
    end_with_parent()  # changing the user has reset this setting


def called(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError if it fails."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
