"""Many languages without a download: pairs, documents and text from the CLDR data that comes with Babel, and
the check of language codes against it.

An *entity* is a name (of a country, language, currency, script or city), a date, a number, a quantity or an
amount of money. Its split follows from a hash of the entity alone, so that what is tested was never seen in
training, in any language or task. Dates, numbers, quantities and amounts are drawn from so many that unseen
ones are made of seen words: there a model can generalise, whereas an unseen name carries to another language
only as far as names resemble.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, time, timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path

import yaml
from babel import Locale, UnknownLocaleError
from babel.core import get_global
from babel.dates import format_date, format_time
from babel.numbers import (
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
    get_currency_precision,
    get_currency_symbol,
)
from babel.units import format_unit

TABLES = Path(__file__).with_suffix(".yaml")  # languages, units, and the sentences of statistics documents
_TABLES = yaml.safe_load(TABLES.read_text(encoding="utf8"))
LANGUAGES = tuple(_TABLES["languages"])
SLICE_LANGUAGES = tuple(_TABLES["slice"])
# Of the statistics documents' headings; the sections are English.
HEADING_LANGUAGES = ("en", "de", "es", "fr", "it")
NAMES_PER_ENTITY = 6  # pairs of languages of one name in training; one in evaluation
DRAWS_CROSS = 3_000  # dates, quantities and amounts each, over all languages
DRAWS_MULTI = 60  # dates, numbers, quantities and amounts each, per language
DRAWN = {"cross": ("date", "quantity", "amount"), "multi": ("date", "number", "quantity", "amount")}
GROUP = {"cross": "cross-lingual", "multi": "multilingual"}

# Code has languages too. Those of CodeSearchNet and CoRNStack, and "code" for sets that mix several.
CODE = ("c", "code", "cpp", "csharp", "go", "java", "javascript", "php", "python", "ruby", "rust", "sql")
# "mul": many languages at once (ISO 639-2); "ber": Berber, a family that Tatoeba's authors left undivided.
_COLLECTIVE = ("mul", "ber")
_FORM = re.compile(r"([a-z]{3})(?:_([A-Z][a-z]{3}))?")

Section = tuple[str, list[str]]  # (topic of the query, equivalent sentences)


def split_of(entity: str) -> str:
    """Split of an entity from its own hash: 80 % "train", 10 % "dev", 10 % "test"."""
    bucket = int.from_bytes(sha256(entity.encode()).digest()[:4], "big") % 10
    return {8: "dev", 9: "test"}.get(bucket, "train")


def names(locale: Locale) -> dict[str, dict[str, str]]:
    """Names in one language: kind → code → name."""
    cities = {zone: data["city"] for zone, data in locale.time_zones.items() if "city" in data}
    if locale.language == "en":  # CLDR leaves out what the zone's own name says
        zones = {zone: zone.rsplit("/", 1)[-1].replace("_", " ") for zone in get_global("zone_territories")}
        cities = zones | cities
    kinds = {
        "territory": locale.territories,
        "language": locale.languages,
        "currency": locale.currencies,
        "script": locale.scripts,
        "city": cities,
    }
    return {kind: {code: found[code] for code in sorted(found)} for kind, found in kinds.items()}


def harvest(seed: int, languages: Sequence[str] = LANGUAGES) -> dict[str, list[dict]]:
    """Texts, pairs and documents, every row with its split under "split".

    Args:
        seed: of the draws of dates, numbers, quantities, amounts, language pairs and templates.
        languages: CLDR codes; English must be among them and there must be two at least.
    Returns: {"texts": [...], "pairs": [...], "documents": [...]}, the same for the same seed and CLDR
        version.
    """
    locales = {language: Locale.parse(language) for language in languages}
    named = {language: names(locale) for language, locale in locales.items()}
    # One name, one entity: the city of Singapore is in the country's split.
    entities = [
        (kind, code, split_of(name.lower()))
        for kind, found in named["en"].items()
        for code, name in found.items()
    ]
    currencies = [code for kind, code, split in entities if kind == "currency" and split == "train"]
    pairs = [*_names(named, entities, seed), *_draws("cross", locales, currencies, seed)]
    monolingual = list(_draws("multi", locales, currencies, seed))
    return {
        "texts": [*_name_texts(named, entities), *_pair_texts(monolingual)],
        "pairs": pairs + monolingual,
        "documents": list(_statistics(named, entities, seed)),
    }


def _pair(mode: str, key: str, split: str, language: str, query: str, document: str) -> dict[str, str]:
    row = {"query": query, "document": document, "key": key, "dataset": f"cldr-{mode}", "group": GROUP[mode]}
    return row | {"language": language, "package": "cldr", "split": split}


def _names(named: dict, entities: list[tuple[str, str, str]], seed: int) -> Iterator[dict[str, str]]:
    """A name in one language → the same thing's name in another one."""
    for kind, code, split in entities:
        key = f"{kind}:{code}"
        draw = random.Random(f"{seed}/{key}")
        names = {language: found[kind][code] for language, found in named.items() if code in found[kind]}
        pairs = [(a, b) for a in names for b in names if names[a] != names[b]]
        for a, b in draw.sample(pairs, min(NAMES_PER_ENTITY if split == "train" else 1, len(pairs))):
            yield _pair("cross", key, split, f"{a}-{b}", names[a], names[b])


def _draws(
    mode: str, locales: dict[str, Locale], currencies: list[str], seed: int
) -> Iterator[dict[str, str]]:
    """Drawn things in words → "cross": the same in another language; "multi": the same written briefly, each
    in one language only."""
    cross, known = mode == "cross", sorted(locales)
    turns = DRAWS_CROSS * len(known) // len(LANGUAGES) if cross else DRAWS_MULTI * len(known)
    for kind in DRAWN[mode]:
        draw, seen = random.Random(f"{seed}/{mode}/{kind}"), set()
        for turn in range(turns):
            key, write = _draw(kind, currencies, draw)
            a, b = draw.sample(known, 2) if cross else [known[turn // DRAWS_MULTI]] * 2
            query, document = write(locales[a], True), write(locales[b], cross)
            if key not in seen and _usable(key, query, document):
                seen.add(key)
                yield _pair(mode, key, split_of(key), f"{a}-{b}" if cross else a, query, document)


def _draw(kind: str, currencies: list[str], draw: random.Random) -> tuple[str, Callable[[Locale, bool], str]]:
    """Draw one date, number, quantity or amount: its key, and how a locale writes it in words or briefly."""
    if kind == "date":
        day = date(1950, 1, 1) + timedelta(days=draw.randrange(36_500))
        return f"date:{day}", lambda locale, words: format_date(day, "full" if words else "short", locale)
    if kind == "number":
        value = draw.randrange(11, 1_000) * 10 ** draw.randrange(2, 8)
        return f"number:{value}", lambda locale, words: _number(value, locale, words)
    if kind == "quantity":
        unit, value = draw.choice(_TABLES["units"]), draw.randrange(2, 1_000)
        lengths = {True: "long", False: "short"}
        return f"{unit}:{value}", lambda locale, words: format_unit(
            value, unit, lengths[words], locale=locale
        )
    money, value = draw.choice(currencies), draw.randrange(2, 5_000)
    kinds = {True: "name", False: "standard"}
    return f"{money}:{value}", lambda locale, words: format_currency(
        value, money, locale=locale, format_type=kinds[words]
    )


def _number(value: int, locale: Locale, words: bool) -> str:
    if not words:
        return format_decimal(value, locale=locale)
    # Chinese, Japanese and Korean have one way only to abbreviate large numbers.
    longest = "long" if "long" in locale.compact_decimal_formats else "short"
    return format_compact_decimal(value, format_type=longest, fraction_digits=2, locale=locale)


def _usable(key: str, query: str, document: str) -> bool:
    """False for equal texts, and where Babel wrote a unit's identifier for want of a pattern."""
    identifier = key.partition(":")[0]
    return query != document and not ("-" in identifier and identifier in query + document)


def _name_texts(named: dict, entities: list[tuple[str, str, str]]) -> Iterator[dict[str, str]]:
    """Pretraining text: every training name in all languages."""
    for kind, code, split in entities:
        if split == "train":
            lines = [
                f"{language}: {found[kind][code]}" for language, found in named.items() if code in found[kind]
            ]
            yield _text(f"{kind}\n" + "\n".join(lines), "mul")


def _pair_texts(pairs: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Pretraining text: forty training pairs of one language at a time."""
    lines: dict[str, list[str]] = {}
    for pair in pairs:
        if pair["split"] == "train":
            lines.setdefault(pair["language"], []).append(f"{pair['query']} = {pair['document']}")
    for language, found in lines.items():
        for start in range(0, len(found), 40):
            yield _text("\n".join(found[start : start + 40]), language)


def _text(text: str, language: str) -> dict[str, str]:
    return {"text": text, "package": "cldr", "kind": "cldr", "language": language, "split": "train"}


def _statistics(named: dict, entities: list[tuple[str, str, str]], seed: int) -> Iterator[dict]:
    """Documents like ConTEB's Insurance: only the heading names the country or currency.

    The sections hold figures and formats, no names of other entities, so nothing held out appears in training
    either. Training documents also come with the heading and queries in other languages than English.
    """
    makers = {"territory": _of_territory, "language": _of_language, "currency": _of_currency}
    for kind, code, split in entities:
        sections = makers[kind](code) if kind in makers else []
        if len(sections) < 4:
            continue
        used = set()
        for language in HEADING_LANGUAGES if split == "train" else ("en",):
            name = named.get(language, {}).get(kind, {}).get(code)
            if name and name.lower() not in used:
                used.add(name.lower())
                yield _statistics_document(kind, code, name, language, sections, split, seed)


def _statistics_document(
    kind: str, code: str, name: str, language: str, sections: list[Section], split: str, seed: int
) -> dict:
    draw = random.Random(f"{seed}/statistics/{kind}/{code}/{language}")
    sections = draw.sample(sections, len(sections))
    heading = draw.choice(_TABLES["headings"]).format(name=name, noun=_TABLES["nouns"][kind])
    queries = [draw.choice(_TABLES["queries"]).format(topic=topic, name=name) for topic, _ in sections]
    return {
        "document_id": f"cldr/{kind}/{code}/{language}",
        "dataset": "statistics",
        "package": "cldr",
        "language": language,
        "chunks": [heading, *(draw.choice(sentences) for _, sentences in sections)],
        "queries": queries,
        "golds": list(range(1, len(sections) + 1)),
        "split": split,
    }


def _filled(kind: str, **facts: object) -> list[Section]:
    table = _TABLES["sections"][kind].items()
    return [(topic, [sentence.format(**facts) for sentence in sentences]) for topic, sentences in table]


def _of_territory(code: str) -> list[Section]:
    """Facts about a country; none for what is no country (continents) or has no locale."""
    spoken = get_global("territory_languages").get(code, {})
    locale = _locale(f"und_{code}")
    if locale is None or not spoken or not code.isalpha():
        return []
    sections = _filled(
        "territory",
        share=max(facts["population_percent"] for facts in spoken.values()),
        official=sum(facts["official_status"] is not None for facts in spoken.values()),
        spoken=len(spoken),
        zones=len(get_global("territory_zones").get(code, ())),
    )
    sections += _formats(locale)
    tenders = get_global("territory_currencies").get(code, [])
    if current := [(money, start) for money, start, end, tender in tenders if tender and not end and start]:
        money, start = current[-1]
        price = format_currency(1234.5, money, locale=locale)
        sections += _filled("money", money=money, since=start[0], price=price)
    return sections


def _of_language(code: str) -> list[Section]:
    """Facts about a language; none where CLDR has no locale for it."""
    locale = _locale(code)
    if locale is None:
        return []
    forms = ["other", *sorted(locale.plural_form.tags)]
    direction = {"ltr": "left to right", "rtl": "right to left"}[locale.text_direction]
    sections = _filled("language", direction=direction, count=len(forms), forms=", ".join(forms))
    sections += _formats(locale)
    countries = [spoken[code] for spoken in get_global("territory_languages").values() if code in spoken]
    if countries:
        share = max(facts["population_percent"] for facts in countries)
        sections += _filled("speakers", countries=len(countries), share=share)
    return sections


def _formats(locale: Locale) -> list[Section]:
    """How a locale writes numbers, dates, times and shares, and when its week begins."""
    english = Locale.parse("en").days["format"]["wide"]
    return _filled(
        "formats",
        number=format_decimal(1234567.8, locale=locale),
        part=format_percent(0.25, locale=locale),
        day=format_date(date(2023, 3, 14), "short", locale=locale),
        hour=format_time(time(15, 30), "short", locale=locale),
        first=english[locale.first_week_day],
        start=english[locale.weekend_start],
        end=english[locale.weekend_end],
    )


def _of_currency(code: str) -> list[Section]:
    """Facts about a currency; none for units that no country ever paid with."""
    tenders = [
        (start[0], end and end[0])
        for currencies in get_global("territory_currencies").values()
        for money, start, end, tender in currencies
        if money == code and tender and start
    ]
    if not tenders:
        return []
    current = sum(end is None for _, end in tenders)
    last = max((end for _, end in tenders if end), default=None)
    return _filled(
        "currency",
        first=min(start for start, _ in tenders),
        decimals=get_currency_precision(code),
        symbol=get_currency_symbol(code, "en"),
        current=current,
        ever=len(tenders),
        ended="It is still legal tender" if current else f"It ceased to be legal tender in {last}",
    )


def _locale(code: str) -> Locale | None:
    """The locale for a language, or for a territory's main language; None where CLDR has none."""
    with suppress(UnknownLocaleError, ValueError):
        return Locale.parse(code)
    return None


def check_language(code: str) -> None:
    """Accepts "deu", "rus_Cyrl", pairs of such ("deu-eng"), "mul" and languages of code ("python").

    Raises: ValueError that says which part is unknown and names near codes.
    """
    if code in CODE:
        return
    for part in code.split("-"):
        form = _FORM.fullmatch(part)
        if form is None:
            raise ValueError(
                f"unknown language {part!r}: write an ISO 639-3 code of three letters, with a script or "
                f"without (deu, rus_Cyrl), a pair of them (deu-eng), mul, or one of {', '.join(CODE)}"
            )
        language, script = form.groups()
        if language not in _languages():
            raise ValueError(f"unknown language {part!r}{_near(language, _languages())} (ISO 639-3)")
        scripts = Locale("en").scripts
        if script and script not in scripts:
            raise ValueError(f"unknown script {script!r} of {part!r}{_near(script, scripts)} (ISO 15924)")


def short_code(code: str) -> str:
    """The code that web standards and many data sets use: "deu" → "de", "cmn_Hani" → "zh", "gsw" → "gsw"."""
    language = code.partition("_")[0]
    return get_global("language_aliases").get(language, language)


@cache
def _languages() -> frozenset[str]:
    # The CLDR has the likely script of 7,000 languages, under the code of two letters if there is one.
    codes = (*get_global("likely_subtags"), *get_global("language_aliases"), *_COLLECTIVE)
    return frozenset(code for code in codes if len(code) == 3)


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"; near: {', '.join(close)}" if close else ""
