"""What a release holds: every file, and a README whose links work where it is shown alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/group/qkv"
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LEADS_TO = re.compile(r'\]\(([^)]*)\)|\b(?:src|href|srcset)="([^"]*)"')

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="git says which files a release has to hold"
)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def release(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Message]:
    """The source of a release that has an address, unpacked, and the metadata of its wheel."""
    place = tmp_path_factory.mktemp("release")
    checkout = place / "checkout"
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, checkout / name)
    settings = checkout / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    assert 'repository = ""' in text
    settings.write_text(text.replace('repository = ""', f'repository = "{ADDRESS}/"'), "utf-8")
    with DefaultIsolatedEnv() as environment:
        builder = ProjectBuilder.from_isolated_env(environment, checkout)
        environment.install(builder.build_system_requires)
        with tarfile.open(builder.build("sdist", place)) as archive:
            archive.extractall(place, filter="data")
        (source,) = place.glob("qkv-*/")
        wheel = ProjectBuilder.from_isolated_env(environment, source).build("wheel", place)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return source, message_from_string(archive.read(name).decode())


@pytest.mark.slow
def test_the_source_holds_every_file(release: tuple[Path, Message], tracked: list[str]) -> None:
    assert not [name for name in tracked if not (release[0] / name).is_file()]


def test_links_of_the_description_are_absolute(release: tuple[Path, Message]) -> None:
    description = CODE.sub("", release[1].get_payload())
    targets = [a or b for a, b in LEADS_TO.findall(description)]
    assert len(targets) > 20
    assert not [target for target in targets if not target.startswith("https://")]
    assert f"{ADDRESS}/raw/HEAD/docs/readme-speed.svg" in targets
    assert f"{ADDRESS}/blob/HEAD/docs/semantics.md" in targets


def test_code_of_the_description_is_that_of_the_readme(release: tuple[Path, Message]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert CODE.findall(release[1].get_payload()) == CODE.findall(readme)


def test_the_project_has_addresses(release: tuple[Path, Message]) -> None:
    urls = dict(url.split(", ") for url in release[1].get_all("Project-URL"))
    assert urls == {
        "Repository": ADDRESS,
        "Documentation": f"{ADDRESS}/tree/HEAD/docs",
        "Changelog": f"{ADDRESS}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }
