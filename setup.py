"""Packaging: pure Python always, native libraries where they can be compiled. Sources and flags live in CMakeLists.txt alone.

Two shared libraries may be added beside the package, both against libtorch's stable ABI and without the Python C API:
``_cpu.abi3.so`` (needs cmake and a C++20 compiler) and ``_cuda.abi3.so`` (needs nvcc too; a CPU-only torch is enough to compile and link it).
Where one cannot be built the package installs without it and the reason is printed and kept in ``sapo_fast/native_build.json``.

Environment:
    SAPO_FAST_CUDA        auto (default): where nvcc is found. 0: never. 1: fail the build when it cannot be built.
    SAPO_FAST_CUDA_ARCHS  semicolon-separated, e.g. "90" or "80;90". Default: the GPUs of this machine, else 80;90;100.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
BUILD_DIR = ROOT / "build" / "native"
RECORD = "native_build.json"  # beside the package's modules; sapo_fast/native.py reads it to say why a library is missing
MIN_TORCH = (2, 10)  # the stable ABI the sources target
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def which(name: str) -> str | None:
    """A program on PATH or beside the interpreter (an environment that was not activated)."""
    return shutil.which(name, path=SEARCH_PATH)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc", path=os.path.join(home, "bin")) or which("nvcc")


def torch_directory() -> Path | None:
    """Where torch is installed, without importing it (an import costs seconds, and this file runs several times in one install)."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def cpu_obstacle() -> str | None:
    """Why the CPU library cannot be compiled here; None when it can."""
    if os.name != "posix":
        return f"the native libraries are built on Linux and macOS, this is {sys.platform}"
    if not (ROOT / "CMakeLists.txt").exists():
        return "the C++ sources are not part of this source tree"
    torch_dir = torch_directory()
    if torch_dir is None:
        return "torch is not importable in the build environment (install torch first, then: pip install --no-build-isolation ...)"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is importable but was not installed by a package manager, so its version is unknown"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MIN_TORCH:
        return f"torch {version} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}, the stable ABI the sources target"
    if not (torch_dir / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
        return f"torch {version} comes without its C++ headers"
    if which("cmake") is None:
        return "cmake is not on PATH (pip install cmake ninja)"
    if which("ninja") is None and which("make") is None:
        return "neither ninja nor make is on PATH (pip install ninja)"
    compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(which(name) for name in compilers):
        return f"no C++ compiler on PATH (looked for {', '.join(compilers)})"
    return None


def cuda_obstacle() -> str | None:
    """Why the CUDA library cannot be compiled here; None when it can. SAPO_FAST_CUDA=1 turns every reason into an error."""
    wish = os.environ.get("SAPO_FAST_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        sys.exit(f"SAPO_FAST_CUDA must be auto, 0 or 1, got {wish!r}")
    if wish == "0":
        return "switched off by SAPO_FAST_CUDA=0"
    reason = cpu_obstacle()
    if reason is None and sys.platform != "linux":
        reason = f"CUDA is built on Linux, this is {sys.platform}"
    if reason is None and find_nvcc() is None:
        reason = "nvcc is not on PATH, in CUDA_HOME or in /usr/local/cuda"
    if reason and wish == "1":
        sys.exit(f"SAPO_FAST_CUDA=1, but the CUDA library cannot be built: {reason}")
    return reason


OBSTACLES = {"_cpu": cpu_obstacle(), "_cuda": cuda_obstacle()}


def say(text: str) -> None:
    print(f"sapo_fast: {text}", file=sys.stderr, flush=True)


def write_record(package_dir: Path) -> None:
    """Keep what was built, and why not, where the installed package can read it (pip hides a build's output)."""
    package_dir.mkdir(parents=True, exist_ok=True)
    (package_dir / RECORD).write_text(json.dumps(OBSTACLES, indent=1) + "\n")


class BuildPython(build_py):
    def run(self) -> None:
        super().run()
        for name, reason in OBSTACLES.items():
            if reason:
                say(f"{name}: not built: {reason}. The package works without it, in plain torch.")
        write_record(ROOT / "sapo_fast" if self.editable_mode else Path(self.build_lib) / "sapo_fast")


class BuildNative(build_ext):
    """Hands each extension to CMake; a failed optional one is reported, recorded and left out."""

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition(".")[2]
        target = Path(self.get_ext_fullpath(ext.name))
        package_dir = ROOT / "sapo_fast" if self.editable_mode else target.parent
        try:
            self.cmake(name)
        except (subprocess.CalledProcessError, OSError) as error:
            OBSTACLES[name] = f"the build failed ({error}); its messages are in the output of pip install -v"
            say(f"{name}: {OBSTACLES[name]}")
            write_record(package_dir)
            raise CompileError(OBSTACLES[name]) from error
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(BUILD_DIR / target.name, target)

    def cmake(self, name: str) -> None:
        cmake = which("cmake")
        options = [
            f"-DSAPO_TORCH_DIR={torch_directory()}",
            f"-DSAPO_CUDA={'OFF' if OBSTACLES['_cuda'] else 'ON'}",
            f"-DSAPO_CUDA_ARCHS={os.environ.get('SAPO_FAST_CUDA_ARCHS', '')}",
            "-DSAPO_TESTS=OFF",
        ]
        if not OBSTACLES["_cuda"]:
            options.append(f"-DCMAKE_CUDA_COMPILER={find_nvcc()}")
        if ninja := which("ninja"):
            options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        run = {"check": True, "stdout": sys.stderr}  # pip reads the standard output of some hooks
        configure = [cmake, "-S", str(ROOT), "-B", str(BUILD_DIR), *options]
        if subprocess.run(configure, stdout=sys.stderr).returncode != 0:  # it may be the cache of another cmake, generator or torch
            shutil.rmtree(BUILD_DIR, ignore_errors=True)
            subprocess.run(configure, **run)
        jobs = [] if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ else ["--parallel", str(os.cpu_count() or 1)]
        subprocess.run([cmake, "--build", str(BUILD_DIR), "--target", name, *jobs], **run)


extensions = [
    Extension(
        f"sapo_fast.{name}", sources=[], py_limited_api=True, optional=not (name == "_cuda" and os.environ.get("SAPO_FAST_CUDA") == "1")
    )
    for name, reason in OBSTACLES.items()
    if reason is None
]

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
    package_data={"sapo_fast": [RECORD]},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if extensions else {},
    zip_safe=False,
)
