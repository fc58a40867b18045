"""How `loraplex status` fits its sections on a terminal: columns, rows and blank lines give way, in this order."""

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loraplex.cli.status_view import Section

_BETWEEN = 2  # blanks between columns
_NARROWEST = 8  # cells of a column that is cut short
_SHORT = 3  # rows of a table that is shown whole or not at all


def on_screen(parts: Sequence[Section], width: int, height: int) -> RenderableType:
    """The sections on at most `height` lines of `width` cells; of what does not fit it says how much there is."""
    gap, num_rows = 1, _num_rows(parts, width, height, gap=1, least=3)
    if len(num_rows) < len(parts):
        gap, num_rows = 0, _num_rows(parts, width, height, gap=0, least=1)
    shown: list[RenderableType] = []
    for index, (part, num) in enumerate(zip(parts, num_rows, strict=False)):
        shown += [Text("")] * (gap * bool(index)) + [Text(line, style="bold") for line in _title(part, width)]
        if part.rows:
            shown.append(_table(part, part.rows[:num], width))
        if num < len(part.rows):
            shown.append(Text(f"… and {len(part.rows) - num} more", style="dim"))
    if len(num_rows) < len(parts):
        shown.append(Text("… the terminal is too low for the rest", style="dim"))
    return Group(*shown)


def _num_rows(parts: Sequence[Section], width: int, height: int, *, gap: int, least: int) -> list[int]:
    """How many rows each section shows, up to the last section that has room for `least` of its own, or all of a few.

    What is left over goes to the tables that miss the fewest rows, so that a long one takes no other's.
    """
    found: list[int] = []
    left = height
    for index, part in enumerate(parts):
        num = min(len(part.rows), least) if len(part.rows) > _SHORT else len(part.rows)
        cost = gap * bool(index) + len(_title(part, width)) + bool(part.rows) + num + (num < len(part.rows))
        if cost > left - (index + 1 < len(parts)):  # one line to say that there is more
            left -= 1
            break
        left -= cost
        found.append(num)
    for index in sorted(range(len(found)), key=lambda index: len(parts[index].rows) - found[index]):
        missing = len(parts[index].rows) - found[index]
        if missing and missing <= left + 1:  # the line that counts the missing is free then
            found[index], left = len(parts[index].rows), left - missing + 1
        elif missing:
            found[index], left = found[index] + left, 0
    return found


def _title(part: Section, width: int) -> list[str]:
    return [piece for line in part.title.splitlines() for piece in textwrap.wrap(line, width)]


def _table(part: Section, rows: Sequence[Sequence[object]], width: int) -> Table:
    """Spares columns that a narrow terminal has no room for, and then cuts the widest ones short."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, (column, *texts))) for column, *texts in zip(part.columns, *cells, strict=True)]
    shown = list(range(len(widths)))
    for column in part.spare:
        if _total(shown, widths) > width:
            shown.remove(column)
    while (excess := _total(shown, widths) - width) > 0:
        widest = max(shown, key=lambda at: widths[at])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] = max(_NARROWEST, widths[widest] - excess)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for at in shown:
        table.add_column(part.columns[at], no_wrap=True, width=widths[at])
    for row in cells:
        table.add_row(*(Text(row[at]) for at in shown))  # Text: names may hold [brackets]
    return table


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + _BETWEEN * (len(shown) - 1)
