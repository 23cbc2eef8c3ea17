"""The text of a plan, laid out for a terminal: coloured bars, lines wrapped between words, a command to copy."""

from __future__ import annotations

from rich.text import Text

from .wrapping import JOINER, hanging, wrapped

STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_black")  # of a bar's segments, in order
_INDENT = 11  # cells of the names of facts


def laid_out(text: str, marks: str, columns: int) -> Text:
    """Return a plan's text in `columns` cells; `marks` are the characters of its bars' segments."""
    found = Text()
    for line in text.splitlines():
        if line.startswith("["):
            found.append_text(_colored(line, marks))
        elif line[:1] in marks and line:
            found.append_text(Text("\n").join(_colored(each, marks) for each in wrapped(_as_segments(line), columns)))
        elif line.startswith("triforce ") and line[_INDENT - 1 : _INDENT] != " ":  # not the fact about that method
            found.append("\n".join(command_lines(line, columns)), "bold")
        else:
            is_fact = line[_INDENT - 1 : _INDENT] == " " and ":" not in line[:_INDENT]  # as the verdict has
            found.append("\n".join(hanging(line, _INDENT, columns) if is_fact else wrapped(line, columns)))
        found.append("\n")
    return found


def _colored(line: str, marks: str) -> Text:
    """Return the line with each mark in its colour."""
    return Text.assemble(*((char, STYLES[marks.index(char)] if char in marks else "") for char in line))


def _as_segments(legend: str) -> str:
    """Return a bar's legend with no line break within one of its entries."""
    return "  ".join(entry.replace(" ", JOINER) for entry in legend.split("  "))


def command_lines(command: str, columns: int) -> list[str]:
    """Return a command in lines that a shell reads as one, broken before its options."""
    lines = [""]
    for piece in command.replace(" --", "\0--").split("\0"):
        joined = f"{lines[-1]} {piece}" if lines[-1] else piece
        if len(joined) <= columns - 2 or not lines[-1].strip():
            lines[-1] = joined
        else:
            lines[-1] += " \\"
            lines.append(f"  {piece}")
    return lines
