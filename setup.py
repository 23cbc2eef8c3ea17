"""Builds the native kernel, an optional extension: without it triforce is installed and runs on torch alone.

It is a plain shared library, loaded by ctypes. It needs a C compiler with GCC's vector extensions, but no headers of
Python or torch and no OpenMP: it has a thread pool of its own. The reason of its failed build is stored beside it, for
`triforce doctor`.
"""

import os
import re
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# Where the files of a release can be read as they are, such as https://HOST/OWNER/triforce/raw/v0.1.0: the page of a
# package index has no pictures and no pages beside it. scripts/build_wheels.sh sets it.
FILES_URL = os.environ.get("TRIFORCE_FILES_URL", "").rstrip("/")

FOLDER = Path("offload") / "kernels" / "native"
KERNEL = Extension(
    "offload.kernels.native._kernel",
    sources=[str(FOLDER / "kernel.c")],
    depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
    extra_compile_args=["-std=gnu11", "-O2", "-g0", "-pthread", "-Wno-psabi"],
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
    py_limited_api=True,  # in its file name: one build for every Python version
)


class BuildKernel(build_ext):
    """The build step: needs no Python headers, and stores the reason of a failure."""

    def build_extension(self, ext):
        library = Path(self.get_ext_fullpath(ext.name))
        reason = library.parent / "build-error.txt"
        reason.unlink(missing_ok=True)
        try:
            super().build_extension(ext)
        except Exception as error:
            library.unlink(missing_ok=True)  # of an earlier build
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
            raise

    def copy_extensions_to_source(self):
        """Copy the library, or the reason of a failure, to the sources; remove those of earlier builds."""
        for old in [*FOLDER.glob("_kernel*"), FOLDER / "build-error.txt"]:
            old.unlink(missing_ok=True)
        super().copy_extensions_to_source()
        reason = Path(self.build_lib) / FOLDER / "build-error.txt"
        if reason.is_file():
            shutil.copy(reason, FOLDER)

    def get_export_symbols(self, ext):
        return []  # no PyInit function: Python does not import it


def index_page() -> str:
    """Return README.md, its links and pictures absolute where FILES_URL is known."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not FILES_URL:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{FILES_URL}/", text)
    pages = FILES_URL.replace("/raw/", "/blob/")  # as pages, on the hosts that tell the two apart
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?![a-z]+:|#)", rf"\1{pages}/", text)


def project_urls() -> dict[str, str]:
    """Return the links that a package index shows."""
    urls = {"Paper": "https://arxiv.org/abs/2404.11912"}
    if FILES_URL:
        urls["Source"] = FILES_URL.partition("/raw/")[0].removesuffix("/-")
    return urls


setup(
    long_description=index_page(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    packages=[
        *find_packages(include=["triforce", "offload", "offload.*", "triforce_cli", "triforce_cli.*"]),
        "offload.profiles",  # data, see pyproject.toml
    ],
    ext_modules=[KERNEL],
    cmdclass={"build_ext": BuildKernel},
    # The libraries know nothing of Python's ABI: one wheel for every version of it from requires-python on.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
