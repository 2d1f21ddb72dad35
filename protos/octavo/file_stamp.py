"""Whether a file was renewed since it was looked at. Entry point: `stamp_of`."""

import os

# Time, inode and size; None while there is no such file.
FileStamp = tuple[int, int, int] | None


def stamp_of(path: str) -> FileStamp:
    """Differs once `path` was written or replaced; follows links, as mounted secrets are."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
