"""Words that the tasks draw from, and a text without meaning to hide things in where the user gives no book."""

from collections.abc import Iterator
from random import Random


def _listed(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _listed(
    "amber brisk calm dusty eager faint gentle hollow ivory jolly keen lofty mellow narrow opal pale quiet rustic "
    "silent tender upper velvet wild yellow ancient bitter crooked distant early frozen golden humble"
)
NOUNS = _listed(
    "anchor basket candle desert engine feather garden hammer island jacket kettle ladder meadow needle orchard pillow "
    "quarry ribbon saddle temple umbrella valley window barrel castle dragon eagle forest guitar harbour lantern mirror"
)
VERBS = _listed("crosses follows guards hides keeps lifts mends paints remembers sells shows turns")
PLACES = (
    "behind the mill",
    "near the river",
    "below the bridge",
    "beside the road",
    "above the town",
    "in the old square",
)
CITIES = _listed(
    "Aberdeen Bergen Cordoba Dresden Esbjerg Florence Granada Hamburg Izmir Jaipur Krakow Lisbon Malaga Naples Odense "
    "Porto Riga Seville Turin Utrecht Verona Warsaw York Zagreb"
)
FIRST_NAMES = _listed("Ada Boris Clara David Edith Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Peter")
LAST_NAMES = _listed("Abbott Barlow Carver Dalton Ellis Farrow Gibson Harlow Irving Jarvis Keller Lawson Mercer Norton")
_DIGITS = 7


def number(draw: Random) -> str:
    """Return a number of seven digits, none of them 0."""
    return "".join(draw.choices("123456789", k=_DIGITS))


def numbers(draw: Random, count: int) -> list[str]:
    """Return so many different numbers."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[number(draw)] = None
    return list(found)


def keys(draw: Random, count: int) -> list[str]:
    """Return so many different keys of two words."""
    pairs = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return draw.sample(pairs, count)


def sentence(draw: Random) -> str:
    """Return a sentence of nothing in particular."""
    subject, other = draw.sample(NOUNS, 2)
    parts = (draw.choice(ADJECTIVES), subject, draw.choice(VERBS), draw.choice(ADJECTIVES), other, draw.choice(PLACES))
    return "The {} {} {} the {} {} {}.".format(*parts)


def prose() -> Iterator[str]:
    """Yield sentences without end, the same ones each time."""
    draw = Random(0)
    while True:
        yield sentence(draw)
