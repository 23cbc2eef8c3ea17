"""Write SVG pictures that are readable on light and dark pages: shapes, text, arrows and plots with axes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#3b82f6", "#e8853a", "#2da44e", "#a371f7", "#e5534b", "#8b949e"
# A code host shows a picture without scripts, but with this style: the page may be light or dark.
STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif;fill:#1f2328}
.bg{fill:#fff;stroke:#d0d7de}.muted{fill:#59636e}.grid{stroke:#d0d7de}.line{stroke:#59636e;fill:none}
.mono{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.bg{fill:#0d1117;stroke:#3d444d}.muted{fill:#9198a1}.grid{stroke:#3d444d}.line{stroke:#9198a1}
}
</style>"""
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L10 5L0 10z" fill="#8b949e"/></marker></defs>'
)


@dataclass
class Picture:
    """An SVG picture of a fixed size in pixels, with a background of its own."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, colour: str, fill: float = 0.16) -> None:
        """Draw a rounded rectangle; `fill` is the opacity of its inside."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{colour}" '
            f'fill-opacity="{fill:g}" stroke="{colour}"/>'
        )

    def text(self, x: float, y: float, text: str, size: int = 13, kind: str = "", anchor: str = "start") -> None:
        """Write one line; `kind` holds CSS classes (`muted`, `mono`) and `bold`."""
        names = " ".join(name for name in kind.split() if name != "bold")
        extra = (f' class="{names}"' if names else "") + (' font-weight="600"' if "bold" in kind else "")
        extra += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(f'<text x="{x:.4g}" y="{y:.4g}" font-size="{size}"{extra}>{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow from the first point to the second."""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="line" stroke-width="1.5" marker-end="url(#arrow)"/>'
        )

    def curve(self, points: Iterable[tuple[float, float]], colour: str, dashed: bool = False) -> None:
        """Draw straight lines through the points, with a dot at each."""
        points = list(points)
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dash}/>')
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]

    def grid(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a thin line."""
        self.parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="grid"/>')

    def svg(self) -> str:
        """Return the file's text."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(self.title)}</title>",
            STYLE,
            ARROW,
        ]
        back = f'<rect x=".5" y=".5" width="{self.width - 1}" height="{self.height - 1}" rx="8" class="bg"/>'
        return "\n".join([*head, back, *self.parts, "</svg>", ""])


@dataclass(frozen=True)
class Scale:
    """Maps values of [low, high] to pixels of [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Plot:
    """A plot area inside a picture, with linear axes."""

    picture: Picture
    x: Scale
    y: Scale

    def axes(self, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], x_name: str, y_name: str) -> None:
        """Draw the grid, the ticks as (value, label), and the names of both axes."""
        for value, label in ys:
            self.picture.grid(self.x.start, self.y(value), self.x.end, self.y(value))
            self.picture.text(self.x.start - 8, self.y(value) + 4, label, 12, "muted", "end")
        for value, label in xs:
            self.picture.text(self.x(value), self.y.start + 20, label, 12, "muted", "middle")
        self.picture.text(self.x.end, self.y.start + 40, x_name, 12, "muted", "end")
        self.picture.text(self.x.start - 8, self.y.end - 14, y_name, 12, "muted", "start")

    def line(self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> None:
        """Draw a curve through points in the units of the axes."""
        self.picture.curve([(self.x(x), self.y(y)) for x, y in points], colour, dashed)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Move labels apart: return heights at least `gap` pixels from each other, in the order of `wanted`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + gap)
    return placed
