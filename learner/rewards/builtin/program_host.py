"""Runs one program that a model wrote, confined. A script of its own in a fresh interpreter, of the standard library alone.

    program_host.py IN OUT REPORT    three open files; the order comes as JSON on its standard input:
    order ─▶ isolate ─▶ enter ─▶ give_up ─▶ the program, which reads IN and writes OUT ─▶ its tests ─▶ the token, into REPORT

Invariant: before the program's first line it sees no process but its own, no network and no files but the interpreter's, which it cannot
change, and a folder in memory; it has no capabilities, and when this process ends, all that the program has started ends too. A kernel or
container that does not allow this is told of in REPORT, and the program is not run. Linux only.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types

# Of prctl(2), unshare(2), mount(2), umount2(2) and mount_setattr(2).
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x2_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000
NO_DEVICES_OR_SETUID, BIND, RECURSIVE, PRIVATE, DETACH = 0x6, 0x1000, 0x4000, 0x4_0000, 0x2
SET_MOUNT_ATTRIBUTES, READ_ONLY, AT_WORKING_DIRECTORY, AT_RECURSIVE = 442, 0x1, -100, 0x8000
CAPABILITIES_VERSION = 0x2008_0522

SEEN = (
    "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/dev/null", "/dev/zero", "/dev/urandom",
    *(path(prefix) for prefix in (sys.prefix, sys.base_prefix) for path in (str, os.path.realpath)),
)  # fmt: skip
FOLDER = "/program"
MAX_FOLDER_MIB, MAX_FILE_MIB, MAX_OPEN_FILES, MAX_PROCESSES = 64, 16, 128, 32
FIRST_USER = 1 << 20
"""As root, a program is a user that nobody else is: root has no limit of processes."""

libc = ctypes.CDLL(None, use_errno=True)


def main(given: str, out: str, report: str) -> None:
    """Run the order."""
    order = json.load(sys.stdin)
    is_confined, mark = not order["unconfined"], order.pop("mark")
    try:
        end_with_parent(order["parent"])
        if is_confined:
            isolate()
            enter(order["folder"])
        limit(order["max_memory_mib"], order["timeout_s"], is_confined=is_confined)
        if is_confined:
            give_up(FIRST_USER + order["parent"])
    except OSError as error:
        os.write(int(report), f"{mark}{error}".encode())
        return
    for ours, theirs in ((int(given), 0), (int(out), 1), (os.open(os.devnull, os.O_WRONLY), 2)):
        os.dup2(ours, theirs)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape")
    sys.argv = ["program.py"]
    if order["tests"] is None:
        run_as_script(order["program"])
    else:
        test(order["program"], order["tests"], int(report), order["token"].encode())


def run_as_script(program: str) -> None:
    """What it prints and how it ends is all that counts."""
    exec(compile(program, "program.py", "exec"), named("__main__"))  # noqa: S102  what this process is for


def test(program: str, tests: str, report: int, token: bytes) -> None:
    """Report the token if both come to their ends. As a module: what the program does as a script, it does not do here."""
    # Taken before the program can put others in their places.
    run, write, leave, names = exec, os.write, os._exit, named("program")
    try:
        tests_code = compile(tests, "tests.py", "exec")
        run(compile(program, "program.py", "exec"), names)
        run(tests_code, names)
    except BaseException:  # whatever it raises, it has failed
        leave(1)
    else:
        write(report, token)
        leave(0)


def named(name: str) -> dict[str, object]:
    """The names of a new module, which dataclasses and pickle look for."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module.__dict__


def end_with_parent(parent: int | None = None) -> None:
    """Be killed when the parent ends."""
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if parent not in (None, os.getppid()):  # it has ended before
        os._exit(1)


def isolate() -> None:
    """Go on as another process, which sees no network and no process but its own children; they end with it. Raises OSError."""
    user, group = os.getuid(), os.getgid()
    alone = NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    if libc.unshare(alone) != 0:  # whoever is not root may do it as the root of a namespace of users
        called("unshare", alone | NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    # The first process of a namespace ignores the signals of its own children: the program is its child.
    for _ in range(2):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        end_with_parent()


def enter(root: str) -> None:
    """Make `root`, an empty folder, the root of all files, with what the interpreter needs in it. Raises OSError."""
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


def show(path: str, place: str) -> None:
    if not os.path.exists(path) or os.path.lexists(place):
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.mkdir(place)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
    called("mount", path.encode(), place.encode(), None, BIND | RECURSIVE, None)


def limit(max_memory_mib: int, timeout_s: float, *, is_confined: bool) -> None:
    """Of each of its processes but for their number."""
    limits = {
        resource.RLIMIT_AS: max_memory_mib << 20,
        resource.RLIMIT_CPU: int(timeout_s) + 1,
        resource.RLIMIT_FSIZE: MAX_FILE_MIB << 20,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if is_confined:  # else all that this user has on the machine count
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def give_up(user: int) -> None:
    """Be nobody else's user, with no capability, for good. Raises OSError."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    called("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    called("capset", header, none)
    end_with_parent()  # a change of the user has taken that back


def called(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
