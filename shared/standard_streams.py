"""A service's standard input, output and error, for one that was started without some of them."""

import os


def fill_standard_streams() -> None:
    """Opens /dev/null as those of the descriptors 0, 1 and 2 that are closed. Call it before any file is opened.

    Else the next file or socket would have that number: a child process could not inherit it, for it is its own
    standard stream there; what libraries print would be written into it; and uvloop aborts as it closes it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(fd, True)
    os.close(fd)
