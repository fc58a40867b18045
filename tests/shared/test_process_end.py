import os
import subprocess
import sys

CODE = """
import atexit, logging, sys
from shared.process_end import end_process
atexit.register(print, "taken apart")
logging.basicConfig(level="INFO", format="%(message)s")
print("printed", end="")
logging.getLogger().info("logged")
end_process(3)
"""


def test_what_was_written_is_read_and_nothing_is_taken_apart() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "printed", "logged\n")


def test_that_nobody_reads_it_is_no_failure() -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that it is written at the end
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 3
