"""Units, forgiven when missing but not when different, and which runs of letters are words."""

from __future__ import annotations

import re

_GROUPS = {
    "inch": "in inch inches", "foot": "ft foot feet", "yard": "yd yds yard yards",
    "mile": "mi mile miles", "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kms kilometer kilometers kilometre kilometres", "mg": "mg milligram milligrams",
    "g": "g gram grams gms", "kg": "kg kgs kilogram kilograms kilo kilos",
    "pound": "lb lbs pound pounds £", "ounce": "oz ounce ounces", "ton": "ton tons tonne tonnes",
    "second": "s sec secs second seconds", "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
    "month": "month months", "year": "yr yrs year years",
    "liter": "l liter liters litre litres", "ml": "ml milliliter milliliters millilitre",
    "degree": "deg degree degrees ° 度", "rad": "rad rads radian radians",
    "dollar": "dollar dollars usd buck bucks", "cent": "cent cents", "euro": "euro euros eur",
    "yen": "yen jpy", "yuan": "yuan rmb cny 元", "unit": "unit units",
    "mph": "mph", "newton": "newton newtons", "joule": "joule joules", "watt": "watt watts",
    "rupee": "rupee rupees rs inr", "percent": "percent pct percentage",
}  # fmt: skip
CANONICAL = {name: unit for unit, names in _GROUPS.items() for name in names.split()}
_ABBREVIATIONS = frozenset(
    "cm cms mm km kms mg kg kgs lb lbs oz ft yd yds mi sec secs min mins hr hrs yr yrs ml mph deg "
    "rad usd inch inches feet foot".split()
)
_ORDINALS = frozenset("st nd rd th".split())
_SMALL_WORDS = frozenset(
    "no on of it if in is so to up us we he me am an as at be by do go my yes odd all any one two "
    "six ten not the for are was his her its new old man red cat dog act day way may box".split()
)
_FILLER = frozenset("the a an of in is are total about exactly".split())


def is_unit_run(run: str) -> bool:
    """A run of letters in math mode, right after a value, that is a unit and not a product."""
    return len(run) > 1 and (run.lower() in CANONICAL or run in _ORDINALS)


def is_word_run(run: str) -> bool:
    """A run of letters that is a word: it compares by spelling, not as a product of variables."""
    if len(run) == 1:
        return False
    lower = run.lower()
    if lower in _SMALL_WORDS:
        return True
    if len(run) >= 3 and run[0].isupper() and run[1:].islower():
        return True
    has_vowel = re.search("[aeiou]", lower) is not None
    if len(run) == 2 or run.isupper():  # ab, AB, ABCD: products, segments, polygons
        return run.isupper() and len(run) > 4 and has_vowel
    if len(run) == 3:
        return has_vowel and "".join(sorted(lower)) != lower and not set(lower) <= set("abcxyz")
    return has_vowel or len(run) > 6


def canonical_word(word: str) -> str:
    """The unit's own name; for a counted noun its singular."""
    lower = word.lower().strip("'.-")
    if lower in CANONICAL:
        return CANONICAL[lower]
    if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss"):
        return lower[:-2] if lower.endswith(("xes", "ches", "shes")) else lower[:-1]
    return lower


def canonical_unit(parts: list[str]) -> str:
    """One string for a unit written as words, `/`, `per`, `^3`, `square`; "" for no unit at all."""
    out: list[str] = []
    pending = ""
    for part in parts:
        lower = part.lower()
        if lower in _ORDINALS or lower in _FILLER:
            continue
        if lower in ("square", "sq", "cubic", "cu", "squared", "cubed"):
            exponent = "^2" if lower.startswith("sq") else "^3"
            if lower.endswith("ed") and out:
                out[-1] += exponent
            else:
                pending = exponent
        elif lower in ("per", "/", "an hour"):
            out.append("/")
        elif part.startswith("^"):
            if out:
                out[-1] += part
        else:
            out.append(canonical_word(part) + pending)
            pending = ""
    joined = " ".join(out)
    return "mph" if joined == "mile / hour" else joined


def same_unit(one: str, other: str) -> bool:
    """A missing unit is forgiven, a different one is not."""
    return not one or not other or one == other
