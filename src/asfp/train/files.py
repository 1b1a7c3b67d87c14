"""Files of a run: written whole or not at all, in a folder that one run at a time may write to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from asfp.errors import AsfpError

LOCK = ".lock"


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write beside the file, then take its place; what was there stays until all is on the disk.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_whole(file, b"new")
    >>> file.read_bytes(), [f.name for f in file.parent.iterdir()]
    (b'new', ['a.txt'])
    """
    aside = path.with_name(f"{path.name}.new")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it while the block runs, also when the process is killed in it.

    The system drops the lock with the process. Where it has none (Windows, some network disks) nothing is locked.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with only_run(folder), only_run(folder):
    ...     pass
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: another process trains in ...: wait for it to end, or use another folder with output=...
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise AsfpError(
            f"output={str(folder)!r} cannot be made a folder ({error.strerror}): use another one with output=..."
        ) from error
    with (folder / LOCK).open("ab") as file:
        if not _locked(file):
            raise AsfpError(
                f"another process trains in {folder}: wait for it to end, or use another folder with output=..."
            )
        yield


def _locked(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return True
    return True
