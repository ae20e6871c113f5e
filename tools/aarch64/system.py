"""QEMU, an arm64 Python of Debian and arm64 wheels, unpacked in one folder without being installed.

apt and pip download them by name; nothing outside of the folder changes, and no rights are needed.
What is there already is used again, until another version of NumPy or llvmlite is asked for.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PYTHON = "python3.11"
DEBS = (f"{PYTHON}:arm64", "libstdc++6:arm64")
SAME_VERSION = ("numpy", "llvmlite", "ml_dtypes")
"""Compiled code is made on this side by the same LLVM, so that both sides need one version."""
WHEELS = ("safetensors", "rich", "pytest", "hypothesis", "threadpoolctl", "array-api-compat")
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")


class SetUpError(Exception):
    """A part of the other machine cannot be had."""


@dataclass(frozen=True, slots=True)
class Core:
    """A processor that QEMU imitates, and what Linux says of it in /proc/cpuinfo.

    LLVM reads that text to choose instructions; QEMU would show it this machine's.
    """

    model: str
    part: str
    features: str

    @property
    def cpuinfo(self) -> str:
        return (
            f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {self.features}\n"
            "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n"
            f"CPU part\t: {self.part}\nCPU revision\t: 1\n\n"
        )


_ARMV8 = "fp asimd evtstrm aes pmull sha1 sha2 crc32"
_ARMV8_2 = f"{_ARMV8} atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
_ARMV9 = (
    f"{_ARMV8_2} jscvt fcma sha3 sha512 sve asimdfhm dit uscat ilrcpc flagm sb paca pacg "
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 flagm2 frint svei8mm svebf16 i8mm bf16 rng bti"
)
CORES = (
    Core("cortex-a57", "0xd07", _ARMV8),
    Core("neoverse-n1", "0xd0c", _ARMV8_2),
    Core("max", "0xd4f", _ARMV9),
)
"""Three generations: Armv8.0, Armv8.2 with half precision and dot products, and Armv9 with SVE2,
which QEMU calls "max" and Linux would show as a Neoverse V2."""


@dataclass(frozen=True, slots=True)
class System:
    """Where the parts lie."""

    folder: Path

    @property
    def qemu(self) -> Path:
        return self.folder / "usr" / "bin" / "qemu-aarch64-static"

    @property
    def site(self) -> Path:
        """The unpacked wheels."""
        return self.folder / "site"

    def root(self, core: Core) -> Path:
        """The unpacked Debian packages, beside the /proc/cpuinfo of a core."""
        return self.folder / core.model


def set_up(folder: Path) -> System:
    """The other machine, downloaded unless it is there.

    Raises
    ------
    SetUpError
        If a download or a command fails.
    """
    wanted = json.dumps([PYTHON, WHEELS, *(f"{n}=={_version(n)}" for n in SAME_VERSION)])
    done = folder / "complete"
    system = System(folder)
    if done.exists() and done.read_text() == wanted:
        return system
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _unpack_debs(system)
    _unpack_wheels(system)
    done.write_text(wanted)
    return system


def _version(name: str) -> str:
    return importlib.metadata.version(name)


def _unpack_debs(system: System) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise SetUpError("this needs apt-get and dpkg-deb, which Debian and its relatives have.")
    with tempfile.TemporaryDirectory() as place:
        state, archives = Path(place, "state"), Path(place, "archives")
        for made in (state / "lists" / "partial", archives / "partial"):
            made.mkdir(parents=True)
        # No package counts as installed, so that all are downloaded.
        (state / "status").touch()
        native = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")
        apt = ["apt-get", "-q"]
        for option in (
            f"Dir::State={state}", f"Dir::State::status={state / 'status'}", f"Dir::Cache={place}",
            f"Dir::Cache::archives={archives}", f"APT::Architecture={native}",
            f"APT::Architectures::={native}", "APT::Architectures::=arm64",
            "APT::Sandbox::User=root", "Acquire::Languages=none", "Acquire::Retries=3",
        ):  # fmt: skip
            apt += ["-o", option]
        _run([*apt, "update"], "apt-get cannot update its lists of packages")
        _run(
            [*apt, "-y", "--download-only", "--no-install-recommends", "install", *DEBS],
            f"apt-get cannot download {PYTHON} for arm64",
        )
        for deb in sorted(archives.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(deb), str(system.folder / "debian")], f"{deb} is damaged")
        _run([*apt, "download", "qemu-user-static"], "apt-get cannot download QEMU", place)
        (qemu,) = Path(place).glob("qemu-user-static*.deb")
        packed = Path(place, "qemu.tar")
        with packed.open("wb") as file:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", str(qemu)], stdout=file, check=True)
        member = f"./usr/bin/{system.qemu.name}"
        _run(["tar", "-xf", str(packed), "-C", str(system.folder), member], "QEMU is damaged")
    debian = system.folder / "debian"
    if sys.version_info[:2] == (3, 11):  # Bytecode is the same for all machines.
        compileall = [sys.executable, "-m", "compileall", "-q", str(debian / "usr/lib" / PYTHON)]
        subprocess.run(compileall, stdout=subprocess.DEVNULL, check=False)
    for core in CORES:
        root = system.root(core)
        (root / "proc").mkdir(parents=True)
        (root / "proc" / "cpuinfo").write_text(core.cpuinfo)
        for part in debian.iterdir():
            (root / part.name).symlink_to(part)


def _unpack_wheels(system: System) -> None:
    pip = [
        sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target",
        str(system.site), "--only-binary=:all:", "--python-version", PYTHON.removeprefix("python"),
        *(f"--platform={name}_aarch64" for name in PLATFORMS),
    ]  # fmt: skip
    pinned = [f"{name}=={_version(name)}" for name in SAME_VERSION]
    _run([*pip, *pinned, *WHEELS], "pip cannot download wheels for arm64")


def _run(command: list[str], failed: str, folder: str | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise SetUpError(f"{failed}. The command was\n{' '.join(command)}\nand it said\n{last}")
