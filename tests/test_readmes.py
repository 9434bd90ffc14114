"""Checks of all pages: links, anchors, paths, config keys, lengths, and the maps of the packages."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from deploy.placement import DeployConfig
from inference_server.config import ServerConfig
from learner.config import LearnerConfig
from protocol.config import SharedConfig
from protocol.config_keys import flatten, is_passed_on, keys_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "inference_server", "learner", "deploy", "tests")
FOLDERS = (".ci", "docs", *PACKAGES)
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in ("docs", *PACKAGES) for page in (ROOT / folder).rglob("*.md"))]
)
FILES = {
    str(path.relative_to(ROOT))
    for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    if "__pycache__" not in path.parts
}
MAX_README_LINES, MAX_README_WORDS = 120, 900
MAX_LINES = 150
"""Limit of a page of docs/."""
MAX_PACKAGE_LINES = 100
"""Limit of the README of a package or folder."""

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TOML = re.compile(r"^```toml\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?<![\w./:<>-])[\w./-]+\.(?:py|toml|md|lock|jinja|json|png)\b")
FOLDER = re.compile(r"`([\w./-]+/)`")
KEY = re.compile(r"`(?:--|\[)?((?:learner|server|deploy)\.[a-z_.-]+)[^`]*`")
MADE_BY_USERS = {
    "config.toml", "run.toml", "my_loss.py", "my_rewards.py", "prompts.jsonl", "guess.py", "path/to/file.py",
}  # fmt: skip
ROOTS = {"": SharedConfig, "learner.": LearnerConfig, "server.": ServerConfig, "deploy.": DeployConfig}
KEYS = {f"{prefix}{key}": field for prefix, root in ROOTS.items() for key, field in keys_of(root).items()}
MADE_BY_RUNS = (
    "runs/", "checkpoints/", "model/", "adapter/", "logs/", "exports/", "keys/", "DIR/", "allowed/", "my-task/",
)  # fmt: skip


def names_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def links(text: str) -> list[str]:
    """Return the relative links."""
    return [link for link in LINK.findall(FENCED.sub("", text)) if "://" not in link]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub creates for the headings."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def problem_of(page: Path, link: str) -> str | None:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return "leads nowhere"
    return f"has no heading #{anchor}" if anchor and anchor not in anchors(target.read_text()) else None


def named_paths(text: str) -> set[str]:
    """Return the files that a page names, including its maps, and folders in backticks; not those of users or runs."""
    paths = set(FILE.findall(LINK.sub("", text))) - MADE_BY_USERS
    paths |= set(FOLDER.findall(FENCED.sub("", text)))
    return {path.rstrip("/") for path in paths if not path.startswith(MADE_BY_RUNS)}


def exists(page: Path, name: str) -> bool:
    """Return whether a file exists in or above the page's folder, or its path's end below it; for docs/, anywhere."""
    base = ROOT if page.parent == ROOT / "docs" else page.parent
    folder = page.parent.relative_to(ROOT)
    above = {str(parent / name) for parent in (folder, *folder.parents)}
    below = (path for path in FILES if path.endswith(f"/{name}"))
    return bool(above & FILES) or any((ROOT / path).is_relative_to(base) for path in below)


def named_keys(text: str) -> set[str]:
    """Return the keys and sections in backticks, including flags, and all keys in shown configs."""
    keys = {key.replace("-", "_") for key in KEY.findall(FENCED.sub("", text))}
    for config in TOML.findall(text):
        keys |= set(flatten(tomllib.loads(config)))
    return {key for key in keys if not key.endswith((".py", ".key", ".pub"))}


def is_key(name: str) -> bool:
    """Return whether a config accepts the name as a key or section, or passes it to a library."""
    if name in KEYS or any(key.startswith(f"{name}.") for key in KEYS):
        return True
    return any(name.startswith(f"{key}.") for key, field in KEYS.items() if is_passed_on(field))


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_every_link_path_and_key_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    assert not {link: problem for link in links(text) if (problem := problem_of(page, link))}
    if page.name != "CHANGELOG.md":  # the changelog names removed files and keys
        assert sorted(name for name in named_paths(text) if not exists(page, name)) == []
        assert sorted(key for key in named_keys(text) if not is_key(key)) == []


def test_every_page_is_linked_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        reached |= new
        targets = {(page.parent / link.partition("#")[0]).resolve() for page in new for link in links(page.read_text())}
        new = (targets & set(PAGES)) - reached
    assert names_of([page for page in PAGES if page not in reached]) == []


def test_pages_stay_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= MAX_README_LINES and len(readme.split()) <= MAX_README_WORDS
    lines = {page: len(page.read_text().splitlines()) for page in PAGES if page.parent != ROOT}
    limits = {page: MAX_LINES if page.parent == ROOT / "docs" else MAX_PACKAGE_LINES for page in lines}
    assert names_of([page for page in lines if lines[page] > limits[page]]) == []


def test_the_site_has_every_page_of_docs() -> None:
    named = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    top = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    assert sorted(named) == sorted([*(page.name for page in (ROOT / "docs").glob("*.md")), *top])


@pytest.mark.parametrize("package", ["protocol", "inference_server", "learner"])
def test_the_map_of_a_package_has_every_folder_and_top_file(package: str) -> None:
    modules = [path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*.py")]
    rooms = {f"{module.parts[0]}/" for module in modules if len(module.parts) > 1}
    files = {module.name for module in modules if len(module.parts) == 1} - {"__init__.py"}
    named = {word for shown in FENCED.findall((ROOT / package / "README.md").read_text()) for word in shown.split()}
    assert sorted((rooms | files) - named) == []


def test_the_reference_of_the_site_explains_every_key() -> None:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "docs/hooks/config_reference.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in hook.reference().splitlines() if row[:3] == "| `"
    ]
    explained = {key.strip("`") for key, *_, meaning in rows if meaning.removesuffix(hook.RESUMABLE)}
    assert set(KEYS) - explained == set()


def test_the_checks_find_missing_files_and_keys() -> None:
    page = ROOT / "README.md"
    text = "`learner/nowhere.py` or nowhere.py\n```\ntrain.py  lost.py\n```\n`learner/attic/` `runs/demo/` run.toml"
    missing = sorted(name for name in named_paths(text) if not exists(page, name))
    assert missing == ["learner/attic", "learner/nowhere.py", "lost.py", "nowhere.py"]
    text = (
        '`learner.weight_sync.compression = "delta"` `[learner.attic]` `--server.http-prt 1`\n```toml\nmdel = '
        '"x"\n[learner.weight_sync]\na = 1\n```\n'
    )
    unknown = sorted(key for key in named_keys(text) if not is_key(key))
    assert unknown == ["learner.attic", "learner.weight_sync.a", "mdel", "server.http_prt"]


def test_the_index_names_each_page_and_getting_started_each_recipe() -> None:
    index, started = ((ROOT / "docs" / name).read_text() for name in ("index.md", "getting-started.md"))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(links(index)) == set()
    recipes = {recipe.name for recipe in (ROOT / "deploy" / "recipes").glob("*.toml")}
    assert {name for name in recipes if f"`{name}`" not in started} == set()
