"""Where a kernel that someone else wrote comes from: a file, a package, or an adapter by its name; where it fails."""

import difflib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tiebreak.kernels.external.options import LoadError
from tiebreak.kernels.kernel import in_one_line
from tiebreak.plugins import Door, PluginError

#: Attention of packages that people use, by the name of the adapter that calls it as its document says.
ADAPTERS = Door[Callable[..., Any]]("tiebreak.adapters", Callable)

# Where code is that is not a user's: Python's own, other packages', and the suite's.
_ROOMS = ("kernels", "backends", "cases", "reports", "tests", "matrix", "programs")  # the last two are a wheel's
_SUITE = tuple(str(Path(__file__).parents[2] / name) for name in _ROOMS)
# Also packages that an environment takes from another one.
_PACKAGES = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
_NOT_THEIRS = ("<", *_SUITE, *sysconfig.get_paths().values(), *_PACKAGES)
EXPECTED = "expected path/to/file.py:function, package.module:function or the name of an adapter"
_TRACED = 10_000  # characters of a traceback that are kept, the last
_FOLDER = f"a folder: name a file in it, {EXPECTED}"


def load(target: str) -> Callable[..., Any]:
    """Return the function that a target names; LoadError: malformed, not found, not importable or not callable.

    A target is `path/to/file.py:function` or `package.module:function`, where the function may be an attribute of a
    class or an object, with dots; a file whose only public function is meant; or the name of an adapter.
    """
    place, separator, name = target.rpartition(":")
    folder = place if os.sep in place else target
    if folder not in ("", *ADAPTERS) and Path(folder).is_dir():
        raise LoadError(_FOLDER)
    if is_adapter(target):
        return _adapter(target)
    if not separator and target.endswith(".py"):
        place, name = target, ""
    if not place or (separator and not name):
        raise LoadError(EXPECTED)
    module = imported(place)
    if getattr(module, "__file__", None) is None and Path(place).is_dir():
        raise LoadError(_FOLDER)
    function: Callable[..., Any] = _function(module, place, name)
    return function


def is_adapter(target: str) -> bool:
    """Return whether a target can only be the name of an adapter, known or not."""
    families = {name.partition(":")[0] for name in ADAPTERS if ":" in name}  # hf:eager and its like
    return target.partition(":")[0] in families or (target != "" and not set(target) & set(".:/\\"))


def _adapter(name: str) -> Callable[..., Any]:
    """Return the adapter of that name; LoadError: there is none, or its package can't be imported."""
    if name not in ADAPTERS:
        near = difflib.get_close_matches(name, ADAPTERS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        example = "one of your own is path/to/file.py:function or package.module:function"
        raise LoadError(f"no adapter {name!r}: {meant}known are {', '.join(ADAPTERS)}; {example}")
    try:
        return ADAPTERS[name]
    except PluginError as error:
        raise LoadError(str(error)) from error


def imported(place: str) -> ModuleType:
    """Import a user's file, or a module by its name; LoadError: there is none, or it raises."""
    try:
        with _without_exit():
            return _from_file(Path(place)) if place.endswith(".py") else _from_package(place, Path.cwd())
    except LoadError:
        raise
    except (Exception, SystemExit) as error:  # whatever the module raises while it is imported
        reason = in_one_line(error)
        asks = "; it asks for a GPU while it is imported (docs/triton.md says what to do)" if "CUDA" in reason else ""
        at = "" if isinstance(error, SyntaxError) else place_of(error)
        raise LoadError(f"cannot import {place}: {reason}{at}{asks}") from error


@contextmanager
def _without_exit() -> Iterator[None]:
    """Let os._exit raise a SystemExit in this process, whose run would end silently; not in one that it forks."""
    end, here = os._exit, os.getpid()

    def refused(code: int) -> None:
        if os.getpid() != here:
            end(code)
        raise SystemExit(f"os._exit({code})")

    vars(os)["_exit"] = refused
    try:
        yield
    finally:
        vars(os)["_exit"] = end


def _function(module: Any, place: str, name: str) -> Any:
    """Return a module's function of this name; without a name, its only public one."""
    names = sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    listed = ", ".join(names) or "none"
    if not name and len(names) != 1:
        raise LoadError(f"name the function, as in {place}:NAME; it has {listed}")
    name, called = name or names[0], module
    for part in name.split("."):
        called = getattr(called, part, None)
    if not callable(called):
        raise LoadError(f"{place} has no function {name!r}; its functions are {listed}")
    if type(called).__module__.startswith("triton."):
        raise LoadError(f"{place}:{name} is a Triton kernel; name the Python function of (q, k, v) that launches it")
    return called


def _from_package(name: str, folder: Path) -> ModuleType:
    """Import a module by its name, also one in this folder: console scripts leave the current one off the path."""
    _put_on_path(folder)
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    """Import a file, under its package's name if it is in one, so that relative imports work."""
    if not path.is_file():
        raise LoadError(f"cannot import {path}: no such file: {path}")
    path = path.resolve()
    if (path.parent / "__init__.py").exists():  # under the package's name, so that its relative imports work
        root, name = package_of(path)
        module = _from_package(name, root)
        if Path(str(module.__file__)).resolve() != path:
            top = name.partition(".")[0]
            raise LoadError(f"cannot import {path}: another package {top!r} is found first, {module.__file__}")
        return module
    _put_on_path(path.parent)  # for the modules next to it, as `python file.py` has them
    # A unique name: another file of that name, or this one with other contents, may be under test too.
    name = f"tiebreak_user_{path.stem}_{zlib.crc32(path.read_bytes(), zlib.crc32(os.fsencode(path))):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles in the file look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def package_of(path: Path) -> tuple[Path, str]:
    """Return the folder that a file is imported from and its module's name there: of a package, or the file's own."""
    root, parts = path.parent, [] if path.stem == "__init__" else [path.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts)


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def is_users(file: str) -> bool:
    """Return whether code in a file is neither installed nor the suite's."""
    return not file.startswith(_NOT_THEIRS)


def users_part(error: BaseException, *, to_the_last: bool = False) -> BaseException | None:
    """Return an error, or the one that it comes from, with the frames from a user's first on, or to a user's last.

    Of installed code, as of a package's, the frames are its own. None: it passed through no code but the suite's.
    """
    every = [*_frames(error.__traceback__)]
    for theirs in (is_users, lambda file: not file.startswith(("<", *_SUITE))):
        if places := [at for at, part in enumerate(every) if theirs(part.tb_frame.f_code.co_filename)]:
            if to_the_last:
                every[places[-1]].tb_next = None
            return error.with_traceback(every[places[0]])
    return None if error.__cause__ is None else users_part(error.__cause__, to_the_last=to_the_last)


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the first frame of a user's on; empty where it has none."""
    part = users_part(error)
    return "" if part is None else "".join(traceback.format_exception(part)).rstrip()[-_TRACED:]


def _frames(part: TracebackType | None) -> Iterator[TracebackType]:
    while part is not None:
        yield part
        part = part.tb_next


def place_of(error: BaseException, file: str | None = None) -> str:
    """Return where an error was raised, after a space: ` (k.py, line 3)`; empty where no line is known.

    It is the deepest line in `file`, or in any file if it has none; without `file`, the deepest line of a user's file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename == file]
    outside = [frame for frame in frames if is_users(frame.filename)]
    chosen = (outside if file is None else in_file or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in chosen)
