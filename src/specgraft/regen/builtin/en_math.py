"""English math families: word problems."""

from __future__ import annotations

from typing import Any

from . import en_math_pure
from .en_words import CITIES, NAMES, words
from .family import Family

_SYSTEM = words(
    "You are a math tutor. Show your work step by step.|Solve the problem and give the final answer "
    "on the last line."
    "|You are a helpful assistant.|Explain the solution so that a twelve-year-old can follow."
)
_GOODS = words(
    "apples|notebooks|tickets|bottles of juice|pencils|bags of rice|candles|postcards|sandwiches|"
    "light bulbs|T-shirts|kilograms of cherries"
    "|metres of fabric|packs of cards|cups of coffee|tins of paint|roses|tennis balls|magazines|jars "
    "of honey|bricks|plants|sheets of stickers|bars of soap"
)
_THINGS = words(
    "marbles|stamps|seashells|books|coins|toy cars|beads|buttons|cookies|photos|comics|pebbles|"
    "badges|puzzles|candies|eggs|feathers|pine cones|balloons|crayons"
)
_MAKERS = words(
    "A bakery|loaves of bread\nA printer|pages\nA dairy|litres of milk\nA factory|chairs\nA potter|"
    "bowls\nA tailor|shirts\nA machine|bottle caps"
    "\nA farm|kilograms of carrots\nA workshop|bicycles\nA mill|sacks of flour\nA call centre|"
    "calls\nA robot|circuit boards\nA studio|posters\nA sawmill|planks"
)
_MADE = list(zip(_MAKERS[::2], _MAKERS[1::2], strict=True))
_VEHICLES = words(
    "A train|A bus|A cyclist|A truck|A ferry|A hiker|A motorbike|A tram|A delivery van|A runner|A "
    "sailing boat|A horse rider"
)
_SALE_ITEMS = words(
    "a jacket|a bicycle|a coffee machine|a pair of boots|a tent|a guitar|a desk|a camera|a set of "
    "plates|a winter coat|a suitcase|a sofa|a phone|a watch"
    "|a printer|a dictionary|a lamp|a skateboard"
)
_SPACES = words(
    "garden|swimming pool|car park|vegetable bed|skating rink|chicken run|terrace|meadow|playground|"
    "field|tennis court|flower bed|courtyard|sandpit"
)
_RECIPES = words(
    "pancakes|lemonade|bread|cookies|soup|fruit punch|muffins|pizza dough|salad dressing|porridge|curry|jam"
)
_INGREDIENTS = words("flour|sugar|water|milk|oats|rice|butter|juice|oil|honey|berries|yoghurt")
_DRAWN = words(
    "red and|blue|marble|bag\ngreen and|white|ball|box\nsilver and|gold|coin|jar\nblack and|brown|"
    "button|tin\nsweet and|sour|candy|bowl\nwinning and|losing|ticket|hat"
)
_BAGS = [tuple(_DRAWN[i : i + 4]) for i in range(0, len(_DRAWN), 4)]
_JOBS = words(
    "paint a fence|dig a trench|clean a hall|pick a field of strawberries|build a wall|sort the mail|"
    "wash all the windows|plant a hedge|load a lorry|tile a roof"
    "|set up the chairs|type a report|pack the parcels|clear the snow"
)
_TANKS = words("water tank|bathtub|swimming pool|aquarium|barrel|fountain|pond|milk tank|rain butt|fuel tank")
_AGES = list(range(6, 19))
_EVENTS = words(
    "film|concert|football match|lecture|flight|exam|train ride|play|cooking class|board meeting|"
    "museum tour|yoga lesson|boat trip|chess game"
)
_GROUPS = words("students|guests|scouts|dancers|tourists|players|singers|campers|volunteers|children|runners|workers")
_UNITS = words("tables|vans|rooms|boats|tents|teams|rows|buses|tour groups|lifeboats")
_SUBJECTS = words(
    "quiz scores|daily temperatures|weekly sales|lap times in seconds|seedling heights in millimetres|minutes "
    "spent reading|rainfall in millimetres|prices in euros|ages of the members|points per round|"
    "daily step counts in hundreds|hours of sleep"
)


def _money(v: dict[str, Any]) -> dict[str, Any]:
    price = f"{v['cents'] / 100:.2f}"
    cost = v["cents"] * v["n"] / 100
    note = next(note for note in (5, 10, 20, 50, 100, 200, 500) if note > cost)
    return {"price": price, "note": note}


def _share(v: dict[str, Any]) -> dict[str, Any] | None:
    if v["a"] == v["b"] or v["k"] >= v["n"]:
        return None
    return {"sum": v["n"] + v["m"]}


def _numbers(v: dict[str, Any]) -> dict[str, Any]:
    step, base = v["step"], v["base"]
    values = [base + (i * i * step + i * 7) % (3 * step + 5) for i in range(v["n"])]
    return {"values": ", ".join(map(str, values)), "low": min(values), "next": base + step}


def _distinct(v: dict[str, Any]) -> dict[str, Any] | None:
    return {} if v["a"] != v["b"] else None


def _clock(v: dict[str, Any]) -> dict[str, Any]:
    start = v["h"] * 60 + v["m"]
    end = (start + v["d"]) % 1440
    return {"start": f"{v['h']}:{v['m']:02d}", "end": f"{end // 60}:{end % 60:02d}", "minutes": v["d"]}


FAMILIES = (
    Family(
        "shopping",
        (
            "{a} buys {n} {goods} at ${price} each. How much does {a} pay?",
            "{n:A} {goods} at ${price} each: how much change do I get from ${note}?",
            "A shop sells {goods} for ${price} each. {a} has ${note}. How many can {a} buy at most?",
            "If {n} {goods} cost ${price} each and delivery costs $4, what is the total?",
        ),
        {"a": NAMES, "goods": _GOODS, "n": range(3, 13), "cents": range(125, 995, 15)},
        _SYSTEM,
        0.25,
        limit=160,
        derive=_money,
    ),
    Family(
        "give-away",
        (
            "{a} has {n} {things} and gives {k} to {b}. How many are left?",
            "{a} has {n} {things}. {b} has {m} more than {a}. How many do they have together?",
            "{a} and {b} have {sum} {things} in total. {a} has {n}. How many does {b} have?",
            "{a} had {n} {things}, lost {k} and then found {m}. How many {things} does {a} have now?",
        ),
        {"a": NAMES, "b": NAMES, "things": _THINGS, "n": range(18, 96), "k": range(3, 18), "m": range(4, 40)},
        _SYSTEM,
        0.2,
        limit=160,
        derive=_share,
    ),
    Family(
        "production-rate",
        (
            "{made.0} makes {n} {made.1} in {h} hours. How many does it make in {k} hours at the same rate?",
            "{made.0} makes {n} {made.1} per hour. How long does it take to make {m}?",
            (
                "{made.0} makes {n} {made.1} a day, and {p}% have to be thrown away. How many good ones are left "
                "after {k} days?"
            ),
        ),
        {
            "made": _MADE,
            "n": range(24, 240, 12),
            "h": [2, 3, 4, 6],
            "k": range(5, 15),
            "m": range(240, 3000, 120),
            "p": [2, 5, 10, 25],
        },
        _SYSTEM,
        0.2,
        limit=120,
    ),
    Family(
        "travel-speed",
        (
            "{v} covers {d} km in {h} hours. What is the average speed?",
            "{v} travels at {s} km/h for {h} hours and {m} minutes. How far does it go?",
            "{v} leaves {a} at {t}:00 and goes at {s} km/h. When has it covered {d} km?",
            (
                "Two towns are {d} km apart. {v} goes one way at {s} km/h and returns at half that speed. How "
                "long is the whole trip?"
            ),
        ),
        {
            "v": _VEHICLES,
            "a": CITIES,
            "d": range(12, 200, 6),
            "h": range(2, 7),
            "s": range(10, 96, 6),
            "m": [10, 15, 20, 30, 45],
            "t": range(6, 20),
        },
        _SYSTEM,
        0.2,
        limit=160,
    ),
    Family(
        "discount",
        (
            "{item:A} costs ${price}. It is reduced by {p}%. What is the new price?",
            "After a {p}% discount {item} costs ${price}. What did it cost before?",
            "The price of {item} rose from ${price} to ${new}. By what percentage did it rise?",
            "{item:A} costs ${price} plus {q}% tax. What is the total?",
            "Is it cheaper to get {p}% off {item} for ${price}, or ${cut} off?",
        ),
        {
            "item": _SALE_ITEMS,
            "price": range(40, 480, 20),
            "p": [5, 10, 15, 20, 25, 30, 40],
            "q": [7, 8, 12, 19],
            "cut": range(5, 60, 5),
            "add": range(2, 30, 4),
        },
        _SYSTEM,
        0.2,
        limit=150,
        derive=lambda v: {"new": v["price"] + v["add"]},
    ),
    Family(
        "area",
        (
            "A rectangular {place} is {a} m long and {b} m wide. What are its area and perimeter?",
            "The area of a rectangular {place} is {area} square metres. It is {a} m long. How wide is it?",
            "How much does a fence around a {a} m by {b} m {place} cost at ${c} per metre?",
            "A {place} is {a} m by {b} m. If both sides are doubled, how does the area change?",
            "A square {place} has a perimeter of {four} m. What is its area?",
        ),
        {"place": _SPACES, "a": range(8, 41), "b": range(3, 25), "c": range(3, 30)},
        _SYSTEM,
        0.2,
        limit=140,
        derive=lambda v: {"area": v["a"] * v["b"], "four": 4 * v["b"]},
    ),
    Family(
        "scale-recipe",
        (
            "A recipe for {dish} uses {g} g of {x} for {n} people. How much {x} is needed for {m} people?",
            "To make {dish} I mix {x} and {y} in the ratio {r}:{q}. How much {y} goes with {g} g of {x}?",
            "{dish:A} for {n} people needs {k} spoons of {x}. I have {l} spoons. How many people can I serve?",
        ),
        {
            "dish": _RECIPES,
            "x": _INGREDIENTS,
            "y": ["water", "salt", "lemon juice", "cream"],
            "g": range(100, 900, 50),
            "n": [2, 3, 4, 5],
            "m": [6, 8, 9, 10, 12],
            "r": [2, 3, 5],
            "q": [1, 4, 7],
            "k": range(4, 11),
            "l": range(12, 40, 3),
        },
        _SYSTEM,
        0.2,
        limit=120,
        derive=lambda v: {} if v["x"] != v["y"] else None,
    ),
    Family(
        "draw-probability",
        (
            ("A {bag.3} holds {n} {first} and {m} {bag.1} {things}. What is the probability of drawing a {first} one?"),
            (
                "There are {n} {first} and {m} {bag.1} {things} in a {bag.3}. I draw two without putting the "
                "first back. How likely is it that both are {first}?"
            ),
            (
                "How many {bag.1} {things} must be added to {n} {first} ones in a {bag.3} so that the chance of "
                "drawing a {bag.1} one is 3/4?"
            ),
        ),
        {"bag": _BAGS, "n": range(3, 16), "m": range(2, 14)},
        _SYSTEM,
        0.2,
        limit=110,
        derive=lambda v: {"first": v["bag"][0].split()[0], "things": v["bag"][2].replace("candy", "candie") + "s"},
    ),
    Family(
        "work-together",
        (
            "{a} can {job} in {n} hours and {b} in {m} hours. How long do they need together?",
            "{k} people can {job} in {n} hours. How long would {q} people need?",
            ("{a} needs {n} hours to {job}. After {h} hours {b} joins, who works just as fast. When are they done?"),
        ),
        {
            "a": NAMES,
            "b": NAMES,
            "job": _JOBS,
            "n": range(4, 13),
            "m": range(3, 11),
            "k": [2, 3, 4],
            "q": [5, 6, 8],
            "h": [1, 2, 3],
        },
        _SYSTEM,
        0.2,
        limit=120,
        derive=_distinct,
    ),
    Family(
        "fill-and-drain",
        (
            ("{tank:An} holds {v} litres. A tap fills it at {r} litres per minute. How long does it take to fill?"),
            "{tank:An} with {v} litres loses {k} litres per hour. How much is left after {h} hours?",
            (
                "A tap adds {r} litres per minute to {tank:an} and a leak removes {k}. Starting empty, how long "
                "until there are {v} litres?"
            ),
            "{tank:An} is {p}% full and holds {v} litres when full. How many litres are missing?",
        ),
        {
            "tank": _TANKS,
            "v": range(120, 1000, 40),
            "r": range(8, 25),
            "k": range(2, 8),
            "h": range(3, 12),
            "p": [10, 25, 40, 60, 75, 85],
        },
        _SYSTEM,
        0.15,
        limit=120,
    ),
    Family(
        "ages",
        (
            "{a} is {n} years old. {b} is {k} times as old. How old will {b} be when {a} is {m}?",
            "{a} is {d} years older than {b}. Together they are {sum}. How old is each?",
            "In {d} years {a} will be twice as old as {a} was {d} years ago. How old is {a} now?",
            "{b} was {n} when {a} was born. {a} is {m} today. What is the ratio of their ages?",
        ),
        {"a": NAMES, "b": NAMES, "n": _AGES, "m": range(20, 40), "k": [2, 3, 4], "d": range(2, 9)},
        _SYSTEM,
        0.15,
        limit=120,
        derive=lambda v: {"sum": 2 * v["n"] + v["d"]} if v["a"] != v["b"] else None,
    ),
    Family(
        "clock-time",
        (
            "{event:An} starts at {start} and lasts {minutes} minutes. When does it end?",
            "The {event} began at {start} and ended at {end}. How long did it last?",
            (
                "I need {k} minutes to get ready and {m2} minutes to travel. The {event} starts at {start}. When "
                "should I start getting ready?"
            ),
            "{event:An} ends at {end} after {minutes} minutes. When did it start?",
        ),
        {
            "event": _EVENTS,
            "h": range(8, 21),
            "m": [0, 10, 15, 25, 35, 40, 50],
            "d": range(35, 160, 5),
            "k": range(10, 50, 5),
            "m2": range(12, 60, 4),
        },
        _SYSTEM,
        0.15,
        limit=120,
        derive=_clock,
    ),
    Family(
        "group-up",
        (
            ("{n:A} {who} are split into {units} of {k}. How many {units} are needed, and how many places stay empty?"),
            "{n:A} {who} have to be shared equally among {k} {units}. How many are left over?",
            ("There are {k} {units} for {n} {who}. {m} more {who} arrive. How many are there per unit on average?"),
            "If {p}% of {n} {who} stay at home, how many {units} of {k} do the others need?",
        ),
        {
            "who": _GROUPS,
            "units": _UNITS,
            "n": range(60, 400, 20),
            "k": range(4, 15),
            "m": range(6, 30),
            "p": [5, 10, 20, 25, 30],
        },
        _SYSTEM,
        0.15,
        limit=120,
    ),
    Family(
        "averages",
        (
            "Here are some {what}: {values}. Find the mean.",
            "Find the median and the range of these {what}: {values}.",
            "The {what} are {values}. What value must come next to bring the mean to {next}?",
            "Put these {what} in order and find the mode, if there is one: {values}.",
            (
                "{a} wrote down the {what}: {values}. One value, {low}, was wrong and is removed. How does the "
                "average change?"
            ),
        ),
        {"what": _SUBJECTS, "a": NAMES, "base": range(11, 60), "step": range(3, 12), "n": [5, 6, 7, 8]},
        _SYSTEM,
        0.2,
        limit=140,
        derive=_numbers,
    ),
    *en_math_pure.FAMILIES,
)
