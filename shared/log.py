"""JSON lines on stderr: one object a record, with the time, level, service, logger and message."""

import json
import logging
import sys
import time

from shared.line_writer import LineWriter, standard_stream

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; `extra` keys become its keys."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **{k: v for k, v in vars(record).items() if k not in _STANDARD},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _LineHandler(logging.Handler):
    def __init__(self, lines: LineWriter) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.write(self.format(record) + "\n")
        except Exception as error:  # its arguments do not fit its message; `handleError` would write to stderr itself
            told = {"level": "error", "message": f"{record.pathname}:{record.lineno} cannot be logged: {error}"}
            self._lines.write(json.dumps(told) + "\n")

    def flush(self) -> None:
        self._lines.drain()


def open_lines(service: str, number: int) -> LineWriter:
    """A writer to standard output (1) or error (2) of this process, for one whose reader may be slow or gone."""

    def notice(num_lost: int) -> str:
        told = {"msg": "lines were lost: they could not be written", "lines": num_lost}
        named = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        return JsonFormatter(service).format(logging.makeLogRecord(named | told)) + "\n"

    return LineWriter(standard_stream(number), notice)


def setup(service: str, level: str = "info", lines: LineWriter | None = None) -> None:
    """Sends all logging of this process as JSON lines to `lines`.

    Without them to stderr itself, which a write may wait for: for processes whose stderr the supervisor reads, which
    never keeps them waiting. What they say right before they are killed is not lost then.
    """
    handler = _LineHandler(lines) if lines is not None else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
