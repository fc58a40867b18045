"""What child processes and the supervisor say to each other without a socket."""

EXIT_CONFIG = 2  # exit code of a process that starting again cannot help
READY_LINE = "ready"  # what a child process writes to standard output, for the supervisor, when its start is over
ALIVE_LINE = "alive"  # what a process that hears events answers the event `answer`
REPORT_PREFIX = "report "  # of a line that tells the supervisor what an API process has counted
