"""A shared file system as clusters have it: a node sees late what another node writes.

    python shared_disk.py FOLDER MOUNT LOCKS SECONDS

This shows FOLDER at MOUNT, as a node sees a folder that it mounts over a network. A second such
process is a second node. It behaves like NFS (RFC 1813 and the man page nfs(5)):

- Other nodes see what is written to a file after the file is closed or synced (close-to-open).
- Names, sizes and times are looked up again only after SECONDS. This is also true of a file that
  did not exist.
- A file that another node has removed or replaced is stale for those that read it (ESTALE).
- LOCKS is `own` (each node sees only its own locks: nolock, local_lock) or `none` (locks fail:
  ENOLCK).
"""

import errno
import os
import sys

import mfusepy

STATS = ("atime_ns", "ctime_ns", "mtime_ns")
NUMBERS = ("blocks", "dev", "gid", "ino", "mode", "nlink", "size", "uid")


class Node(mfusepy.Operations):
    """A node's view of a folder. The methods and their arguments are FUSE's operations.

    Args:
        folder: the shared folder.
    """

    use_ns = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # By file handle. `unsent` has what was written. `appended` is for files opened to append:
        # the kernel looks up the length only after a while, so its end of the file may be wrong.
        self.unsent: dict[int, list[tuple[int, bytes]]] = {}
        self.appended: dict[int, int | None] = {}

    def _real(self, path: str) -> str:
        return self.folder + path

    def _send(self, fh: int) -> None:
        for offset, data in self.unsent.pop(fh, ()):
            os.pwrite(fh, data, offset)

    # -- names ------------------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Return the result of `stat`, once all that this node wrote is sent, as NFS does."""
        found = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        for each in [each for each in self.unsent if os.path.samestat(os.fstat(each), found)]:
            self._send(each)
        found = os.lstat(self._real(path)) if fh is None else os.fstat(fh)
        values = {f"st_{name}": getattr(found, f"st_{name}") for name in NUMBERS}
        return values | {f"st_{name[:-3]}": getattr(found, f"st_{name}") for name in STATS}

    def readdir(self, path: str, fh: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *os.listdir(self._real(path))]

    def readlink(self, path: str) -> str:
        """Return where a link leads."""
        return os.readlink(self._real(path))

    def mkdir(self, path: str, mode: int) -> int:
        """Make a folder."""
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        """Remove a folder."""
        os.rmdir(self._real(path))
        return 0

    def unlink(self, path: str) -> int:
        """Remove a name."""
        os.unlink(self._real(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        """Rename a file, and replace a file that has the new name."""
        os.rename(self._real(old), self._real(new))
        return 0

    def symlink(self, target: str, source: str) -> int:
        """Make a link."""
        os.symlink(source, self._real(target))
        return 0

    def link(self, target: str, source: str) -> int:
        """Give a file a second name."""
        os.link(self._real(source), self._real(target))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        """Change the mode of a file."""
        os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        """Change the owner of a file."""
        os.chown(self._real(path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        """Change the times of a file."""
        os.utime(self._real(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """Return the size and the free space of the file system."""
        found = os.statvfs(self._real(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    # -- files ------------------------------------------------------------------------------------

    def create(self, path: str, mode: int, flags: int) -> int:
        """Create and open a file. Another node may have created it in the meantime (no O_EXCL)."""
        return self.open(path, flags & ~os.O_ACCMODE | os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a file."""
        fh = os.open(self._real(path), flags & ~(os.O_APPEND | os.O_NOFOLLOW), mode)
        if flags & os.O_APPEND:
            self.appended[fh] = None
        return fh

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Read from a file; raise ESTALE if another node has removed it."""
        self._send(fh)
        if os.fstat(fh).st_nlink == 0:
            raise OSError(errno.ESTALE, path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        """Keep the data until the file is closed or synced."""
        if fh in self.appended:
            if self.appended[fh] is None:
                self.appended[fh] = os.fstat(fh).st_size - offset
            offset += self.appended[fh] or 0
        self.unsent.setdefault(fh, []).append((offset, data))
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        """Change the length of a file."""
        if fh is None:
            os.truncate(self._real(path), length)
        else:
            self._send(fh)
            os.ftruncate(fh, length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        """Write the kept data, when the file is closed."""
        self._send(fh)
        return 0

    def fsync(self, path: str, _data_only: int, fh: int) -> int:
        """Write the kept data."""
        self._send(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        """Forget an open file."""
        self._send(fh)
        self.appended.pop(fh, None)
        os.close(fh)
        return 0


class NodeWithoutLocks(Node):
    """A node where locks fail, as on Lustre without `flock`, or NFS without a lock server."""

    def lock(self, path: str, fh: int, command: int, lock: object) -> int:
        """Refuse fcntl's locks."""
        raise OSError(errno.ENOLCK, path)

    def flock(self, path: str, fh: int, operation: int) -> int:
        """Refuse flock's."""
        raise OSError(errno.ENOLCK, path)


if __name__ == "__main__":
    shared, mount, locks, seconds = sys.argv[1:]
    late = {f"{name}_timeout": seconds for name in ("attr", "entry", "negative")}
    kind = {"own": Node, "none": NodeWithoutLocks}[locks]
    # Without the kernel's cache of file contents, which would end at the files' old length.
    options = {"foreground": True, "nothreads": True, "direct_io": True}
    mfusepy.FUSE(kind(shared), mount, **options, **late)
