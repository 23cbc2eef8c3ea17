"""Commands and groups of the command line: they accept other programs' names, and show no type for a switch."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from .mistakes import refuse_other_short_options
from .other_names import accepted


class _Plain:
    """A switch has no value, so that its help shows no type."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Group(_Plain, TyperGroup):
    """A group of commands."""


class Command(_Plain, TyperCommand):
    """A command that accepts an option by another program's name, where that has an equal meaning."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = (name for param in self.params for name in (*param.opts, *param.secondary_opts))
        own = frozenset(name[2:] for name in names if name.startswith("--"))
        ctx.token_normalize_func = lambda name: accepted(name, own, self.name) if len(name) > 1 else name
        given = args[: args.index("--")] if "--" in args else list(args)  # the parser takes from `args`
        try:
            return super().parse_args(ctx, args)
        except TyperException:
            refuse_other_short_options(given, ctx)
            raise
