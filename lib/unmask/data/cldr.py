"""Many languages without a download: pairs, documents and text from the CLDR data that comes with Babel.

An *entity* is a name (of a country, language, currency, script or city), a date, a number, a quantity or an
amount of money. Its split follows from a hash of the entity alone, so that what is tested was never seen in
training, in any language or task. Dates, numbers, quantities and amounts are drawn from so many that unseen
ones are made of seen words: there a model can generalise, whereas an unseen name carries to another language
only as far as names resemble.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date, time, timedelta
from hashlib import sha256

from babel import Locale
from babel.core import UnknownLocaleError, get_global
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

# Sixty languages whose names, dates, units and currencies CLDR covers in full, over all larger scripts and
# families.
LANGUAGES = (
    *("af", "am", "ar", "az", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu"),
    *("fa", "fi", "fr", "gu", "he", "hi", "hr", "hu", "hy", "id", "is", "it", "ja", "ka", "kk"),
    *("km", "kn", "ko", "lt", "lv", "mk", "ml", "mr", "my", "nb", "nl", "pa", "pl", "pt", "ro"),
    *("ru", "sk", "sl", "sq", "sr", "sv", "sw", "ta", "te", "th", "tr", "uk", "ur", "vi", "zh"),
)
# Twelve of them, over six scripts, for a slice of the corpus.
SLICE_LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "it", "ja", "ru", "sw", "tr", "zh")
HEADING_LANGUAGES = (
    "en",
    "de",
    "es",
    "fr",
    "it",
)  # of the statistics documents' headings; the sections are English
NAMES_PER_ENTITY = 6  # pairs of languages of one name in training; one in evaluation
DRAWS_CROSS = 3_000  # dates, quantities and amounts each, over all languages
DRAWS_MULTI = 60  # dates, numbers, quantities and amounts each, per language
UNITS = (
    *(
        "length-kilometer",
        "length-meter",
        "length-centimeter",
        "length-mile",
        "mass-kilogram",
        "mass-gram",
        "mass-tonne",
    ),
    *("duration-year", "duration-month", "duration-week", "duration-day", "duration-hour", "duration-minute"),
    *("duration-second", "volume-liter", "volume-milliliter", "volume-cubic-meter", "area-square-kilometer"),
    *(
        "area-hectare",
        "speed-kilometer-per-hour",
        "temperature-celsius",
        "energy-kilowatt-hour",
        "power-watt",
    ),
    *("digital-gigabyte", "digital-megabyte", "electric-volt", "frequency-hertz", "pressure-hectopascal"),
)

Section = tuple[str, tuple[str, ...]]  # (topic of the query, equivalent sentences)


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
    pairs = [*_cross_names(named, entities, seed), *_cross_draws(locales, currencies, seed)]
    monolingual = list(_multi(locales, currencies, seed))
    return {
        "texts": [*_name_texts(named, entities), *_pair_texts(monolingual)],
        "pairs": pairs + monolingual,
        "documents": list(_statistics(named, entities, seed)),
    }


def _pair(dataset: str, key: str, split: str, language: str, query: str, document: str) -> dict[str, str]:
    group = {"cldr-cross": "cross-lingual", "cldr-multi": "multilingual"}[dataset]
    row = {"query": query, "document": document, "key": key, "dataset": dataset, "group": group}
    return row | {"language": language, "package": "cldr", "split": split}


def _cross_names(named: dict, entities: list[tuple[str, str, str]], seed: int) -> Iterator[dict[str, str]]:
    """A name in one language → the same thing's name in another one."""
    for kind, code, split in entities:
        key = f"{kind}:{code}"
        draw = random.Random(f"{seed}/{key}")
        spoken = [language for language in named if code in named[language][kind]]
        pairs = [(a, b) for a in spoken for b in spoken if named[a][kind][code] != named[b][kind][code]]
        for a, b in draw.sample(pairs, min(NAMES_PER_ENTITY if split == "train" else 1, len(pairs))):
            yield _pair("cldr-cross", key, split, f"{a}-{b}", named[a][kind][code], named[b][kind][code])


def _draw(kind: str, currencies: list[str], draw: random.Random) -> tuple[str, Callable[[Locale, bool], str]]:
    """Draw one date, number, quantity or amount: its key, and how a locale writes it in words or briefly."""
    if kind == "date":
        day = date(1950, 1, 1) + timedelta(days=draw.randrange(36_500))
        return f"date:{day}", lambda locale, words: format_date(
            day, "full" if words else "short", locale=locale
        )
    if kind == "number":
        value = draw.randrange(11, 1_000) * 10 ** draw.randrange(2, 8)
        return (
            f"number:{value}",
            lambda locale, words: (
                format_compact_decimal(value, format_type=_longest(locale), fraction_digits=2, locale=locale)
                if words
                else format_decimal(value, locale=locale)
            ),
        )
    if kind == "quantity":
        unit, value = draw.choice(UNITS), draw.randrange(2, 1_000)
        return f"{unit}:{value}", lambda locale, words: format_unit(
            value, unit, "long" if words else "short", locale=locale
        )
    currency, value = draw.choice(currencies), draw.randrange(2, 5_000)
    return f"{currency}:{value}", lambda locale, words: format_currency(
        value, currency, locale=locale, format_type="name" if words else "standard"
    )


def _longest(locale: Locale) -> str:
    """Chinese, Japanese and Korean have one way only to abbreviate large numbers."""
    return "long" if "long" in locale.compact_decimal_formats else "short"


def _usable(key: str, query: str, document: str) -> bool:
    """False for equal texts, and where Babel wrote a unit's identifier for want of a pattern."""
    identifier = key.partition(":")[0]
    return query != document and not ("-" in identifier and identifier in query + document)


def _cross_draws(locales: dict[str, Locale], currencies: list[str], seed: int) -> Iterator[dict[str, str]]:
    """A date, quantity or amount in words in one language → the same in another one."""
    for kind in ("date", "quantity", "amount"):
        draw, seen = random.Random(f"{seed}/cross/{kind}"), set()
        for _ in range(DRAWS_CROSS * len(locales) // len(LANGUAGES)):
            key, write = _draw(kind, currencies, draw)
            a, b = draw.sample(sorted(locales), 2)
            query, document = write(locales[a], True), write(locales[b], True)
            if key not in seen and _usable(key, query, document):
                seen.add(key)
                yield _pair("cldr-cross", key, split_of(key), f"{a}-{b}", query, document)


def _multi(locales: dict[str, Locale], currencies: list[str], seed: int) -> Iterator[dict[str, str]]:
    """Something in words → the same written briefly; each drawn thing serves one language only."""
    for kind in ("date", "number", "quantity", "amount"):
        draw, seen = random.Random(f"{seed}/multi/{kind}"), set()
        for language in [language for language in sorted(locales) for _ in range(DRAWS_MULTI)]:
            key, write = _draw(kind, currencies, draw)
            query, document = write(locales[language], True), write(locales[language], False)
            if key not in seen and _usable(key, query, document):
                seen.add(key)
                yield _pair("cldr-multi", key, split_of(key), language, query, document)


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
    makers = {
        "territory": _territory_sections,
        "language": _language_sections,
        "currency": _currency_sections,
    }
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
    noun = {"territory": "place", "language": "language", "currency": "currency"}[kind]
    heading = draw.choice(
        [f"{name}. Facts and figures.", f"Statistics: {name}", f"{name}, a {noun} in figures"]
    )
    queries = []
    for topic, _ in sections:
        templates = f"{topic} {name}", f"{name} {topic}", f"{name}: {topic}", f"the {topic} of {name}"
        queries.append(draw.choice(templates))
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


def _territory_sections(code: str) -> list[Section]:
    """Facts about a country; none for what is no country (continents) or has no locale."""
    spoken = get_global("territory_languages").get(code, {})
    currencies = get_global("territory_currencies").get(code, [])
    locale = _locale(f"und_{code}")
    if locale is None or not spoken or not code.isalpha():
        return []
    share = max(facts["population_percent"] for facts in spoken.values())
    official = sum(facts["official_status"] is not None for facts in spoken.values())
    zones = len(get_global("territory_zones").get(code, ()))
    sections = [
        (
            "languages",
            (
                f"{share:g} percent speak the most common tongue; {official} of {len(spoken)} are official.",
                f"Of {len(spoken)} tongues, {official} are official; {share:g} percent share the largest.",
            ),
        ),
        (
            "time zones",
            (f"Clocks follow {zones} different zones.", f"The land is divided into {zones} zones."),
        ),
        *_format_sections(locale),
    ]
    current = [(money, start) for money, start, end, tender in currencies if tender and end is None and start]
    if current:
        money, start = current[-1]
        price = format_currency(1234.5, money, locale=locale)
        sections.append(
            (
                "currency",
                (
                    f"People pay in {money}, legal tender since {start[0]}; a price reads {price}.",
                    f"Since {start[0]} money is counted in {money}; in a shop one may read {price}.",
                ),
            )
        )
    return sections


def _language_sections(code: str) -> list[Section]:
    """Facts about a language; none where CLDR has no locale for it."""
    locale = _locale(code)
    if locale is None:
        return []
    countries = [spoken[code] for spoken in get_global("territory_languages").values() if code in spoken]
    plural = ["other", *sorted(locale.plural_form.tags)]
    direction = {"ltr": "left to right", "rtl": "right to left"}[locale.text_direction]
    sections = [
        ("writing", (f"Lines run from {direction}.", f"Text is read {direction}.")),
        (
            "plural",
            (
                f"Nouns after a number take {len(plural)} forms: {', '.join(plural)}.",
                f"Counting needs {len(plural)} grammatical forms ({', '.join(plural)}).",
            ),
        ),
        *_format_sections(locale),
    ]
    if countries:
        share = max(facts["population_percent"] for facts in countries)
        sections.append(
            (
                "speakers",
                (
                    f"It is used in {len(countries)} countries, by up to {share:g} percent of the people.",
                    f"People of {len(countries)} countries use it, in one of them {share:g} percent.",
                ),
            )
        )
    return sections


def _format_sections(locale: Locale) -> list[Section]:
    """How a locale writes numbers, dates, times and shares, and when its week begins."""
    number, share = format_decimal(1234567.8, locale=locale), format_percent(0.25, locale=locale)
    day, hour = (
        format_date(date(2023, 3, 14), "short", locale=locale),
        format_time(time(15, 30), "short", locale=locale),
    )
    english = Locale.parse("en").days["format"]["wide"]
    first, rest = english[locale.first_week_day], (english[locale.weekend_start], english[locale.weekend_end])
    return [
        ("numbers", (f"A large figure is written {number}.", f"With separators one writes {number}.")),
        (
            "percentages",
            (f"A quarter of something is given as {share}.", f"One part in four is printed {share}."),
        ),
        (
            "dates",
            (f"The fourteenth of March 2023 becomes {day}.", f"In brief, 14 March 2023 is noted as {day}."),
        ),
        (
            "clock",
            (f"Half past three in the afternoon is {hour}.", f"Timetables show half past three as {hour}."),
        ),
        (
            "week",
            (
                f"It starts on {first}; {rest[0]} and {rest[1]} bound the days of rest.",
                f"The first day is {first}; people rest from {rest[0]} to {rest[1]}.",
            ),
        ),
    ]


def _currency_sections(code: str) -> list[Section]:
    """Facts about a currency; none for units that no country ever paid with."""
    tenders = [
        (start, end)
        for currencies in get_global("territory_currencies").values()
        for money, start, end, tender in currencies
        if money == code and tender and start
    ]
    if not tenders:
        return []
    first = min(start[0] for start, _ in tenders)
    current = sum(end is None for _, end in tenders)
    last = max((end[0] for _, end in tenders if end), default=None)
    decimals, symbol = get_currency_precision(code), get_currency_symbol(code, "en")
    ended = "It is still legal tender" if current else f"It ceased to be legal tender in {last}"
    return [
        (
            "introduction",
            (f"The first notes and coins date from {first}.", f"It has been issued since {first}."),
        ),
        (
            "smallest amount",
            (f"Prices have {decimals} decimals.", f"Accounts are kept to {decimals} digits after the point."),
        ),
        ("symbol", (f"In print it is shortened to {symbol}.", f"Price tags carry the sign {symbol}.")),
        (
            "countries",
            (
                f"{current} territories pay with it today, {len(tenders)} did at some time.",
                f"Out of {len(tenders)} places that ever used it, {current} do so now.",
            ),
        ),
        ("validity", (f"{ended}.", f"{ended}, as the records show.")),
    ]


def _locale(code: str) -> Locale | None:
    """The locale for a language, or for a territory's main language; None where CLDR has none."""
    with suppress(UnknownLocaleError, ValueError):
        return Locale.parse(code)
    return None
