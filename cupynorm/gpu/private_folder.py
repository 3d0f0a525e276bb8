"""Folders that only this user can write, for all that is compiled or loaded.

What another user could exchange would run as this user. So folders are made with mode 0700 and
checked whenever they are used.
"""

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SECONDS_UNTIL_STALE = 24 * 3600
_temporary: dict[str, Path] = {}  # the folders of this process, or of the one that it is a fork of


def cache_folder(name: str) -> Path:
    """A folder of the user's cache; a temporary one where the cache cannot be written.

    Raises PermissionError where others can write to it or replace it.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    home = home if os.path.isabs(home) else os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(os.path.realpath(home)) / "cupynorm" / name
    try:
        for each in (*reversed(folder.parents), folder):
            if not os.path.lexists(each):
                each.mkdir(0o700, exist_ok=True)
    except OSError:
        return _temporary_folder(name, None)
    _check(folder, (folder, folder.parent))
    return folder if os.access(folder, os.W_OK | os.X_OK) else _temporary_folder(name, None)


def folder_of_process(name: str) -> Path:
    """A folder in cache_folder(name) that is removed when this process ends."""
    parent = cache_folder(name)
    _remove_stale(parent)
    return _temporary_folder(f"{name} of {parent}", parent)


def is_private(path: Path, kind=stat.S_ISREG) -> bool:
    """Whether a path is a file, or of another kind, that this user alone owns and can write."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_own = found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS
    return kind(found.st_mode) and is_own


@contextlib.contextmanager
def locked(path: Path, seconds: float = 120) -> Iterator[None]:
    """Keeps other processes and threads waiting, for some time, and where the system has locks."""
    end = time.monotonic() + seconds
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path, flags, 0o600)
    is_held = _waited(lock, end)
    try:
        yield
    finally:
        if is_held:
            path.unlink(missing_ok=True)  # who waits for it finds the work done
        os.close(lock)


def _waited(lock: int, end: float) -> bool:
    import fcntl

    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return False
    return False


def _check(folder: Path, ours: tuple[Path, ...]) -> None:
    """Raises PermissionError unless this user alone can write to the folder or replace it."""
    own, root = os.geteuid(), 0
    for each in (folder, *folder.parents):
        is_ours = each in ours
        found = os.lstat(each)
        writable = found.st_mode & _WRITABLE_BY_OTHERS
        if not is_ours and found.st_gid == os.getegid():  # many homes are writable by their group
            writable &= stat.S_IWOTH
        if not stat.S_ISDIR(found.st_mode):
            wrong, mend = "is not a folder (links are not followed)", f"remove {each}"
        elif found.st_uid != own and (is_ours or found.st_uid != root):
            wrong, mend = f"belongs to user {found.st_uid}", f"remove {each}"
        elif writable and (is_ours or not found.st_mode & stat.S_ISVTX):
            wrong, mend = "can be written by other users", f"chmod go-w {each}"
            mend = f"rm -r {each}" if is_ours else mend  # others may have put files there
        else:
            continue
        raise PermissionError(
            f"{each} {wrong}; expected a folder that only user {own} can change, because compiled "
            f"code is loaded from it: {mend}, or set XDG_CACHE_HOME to a folder of your own"
        )


def _temporary_folder(key: str, parent: Path | None) -> Path:
    folder = _temporary.get(key)
    if folder is None or not is_private(folder, stat.S_ISDIR):
        prefix = f"{os.getpid()}-" if parent else "cupynorm-"
        folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=prefix, dir=parent)))
        atexit.register(_remove, folder, os.getpid())
        _check(folder, (folder,))
        _temporary[key] = folder
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the folder to its parent
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Removes the folders of processes that were killed; they may be of another machine."""
    for folder in parent.iterdir():
        with contextlib.suppress(OSError, ValueError):
            if time.time() - folder.stat().st_mtime > _SECONDS_UNTIL_STALE:
                try:
                    os.kill(int(folder.name.split("-")[0]), 0)
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)
