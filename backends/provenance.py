"""Which code of the suite this is: a checkout's commit, or an installed wheel."""

import base64
import hashlib
import os
import subprocess
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = "tiebreak"


def commit(checkout: Path = CHECKOUT) -> str | None:
    """Return the git commit of a checkout's top folder: 40 digits, and "-dirty" if tracked files differ from it.

    None without git, without a commit, or if the folder is merely inside another repository (an installed copy in a
    virtual environment).
    """
    # In a hook, git points these at the repository that the hook belongs to.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != checkout.resolve():
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def wheel(package: str = PACKAGE, module: Path = Path(__file__)) -> str | None:
    """Return the installed wheel that this code, of which `module` is a file, runs from; None if it runs from none.

    It is named by its version and, after "sha256:", a digest of its files' names and contents, with "-dirty" appended
    if a file differs from the wheel's.
    """
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    listed = [file for file in installed.files or () if file.parts[0] == package and file.suffix != ".pyc"]
    files = {file: Path(str(file.locate())).resolve() for file in sorted(listed)}
    if module.resolve() not in files.values():
        return None
    digest, dirty = hashlib.sha256(), ""
    for file, path in files.items():
        file_digest = hashlib.sha256(path.read_bytes() if path.is_file() else b"")
        digest.update(f"{file.as_posix()} {file_digest.hexdigest()}\n".encode())
        # As RECORD has it: https://packaging.python.org/specifications/recording-installed-packages
        if file.hash is None or file.hash.value != base64.urlsafe_b64encode(file_digest.digest()).rstrip(b"=").decode():
            dirty = "-dirty"
    return f"{installed.version} sha256:{digest.hexdigest()}{dirty}"
