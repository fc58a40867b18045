"""The host arena: anonymous shared memory that the adapter process writes and the engine process reads.

A memfd, because /dev/shm is 64 MB in containers. Its size is sealed, so no process can make another's mapping fault.
"""

import fcntl
import mmap
import os


def create_host_arena(nbytes: int) -> int:
    """A file descriptor of `nbytes` of shared memory, zeroed; pages are taken when they are first touched.

    Pass it to child processes with `pass_fds`. Raises OSError.
    """
    fd = os.memfd_create("loraplex-host-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_host_arena(fd: int) -> memoryview:
    """All of the arena, writable, as bytes. It stays mapped as long as the view lives."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
