"""English math families: arithmetic, algebra, geometry, units and ideas."""

from __future__ import annotations

from .en_words import AUDIENCES, NAMES, words
from .family import Family, fill_in
from .numbers import equation, fraction_pair, sequence, system_of_two

_SYSTEM = words(
    "You are a math tutor. Show your work step by step.|Give only the final answer.|You are a helpful assistant."
)
_CONVERT = [  # from, to
    ("kilometres", "miles"),
    ("miles", "kilometres"),
    ("pounds", "kilograms"),
    ("kilograms", "pounds"),
    ("inches", "centimetres"),
    ("feet", "metres"),
    ("degrees Celsius", "degrees Fahrenheit"),
    ("degrees Fahrenheit", "degrees Celsius"),
    ("litres", "US gallons"),
    ("ounces", "grams"),
    ("acres", "square metres"),
    ("hours", "seconds"),
    ("days", "minutes"),
    ("knots", "kilometres per hour"),
    ("metres per second", "kilometres per hour"),
    ("megabytes", "gigabytes"),
    ("calories", "joules"),
    ("yards", "metres"),
    ("weeks", "hours"),
    ("millilitres", "cups"),
    ("tonnes", "pounds"),
    ("nautical miles", "metres"),
]
_THEOREMS = words(
    "the Pythagorean theorem|the quadratic formula|prime factorisation|standard deviation|the slope "
    "of a line|negative numbers|why division by zero is undefined"
    "|logarithms|percentages|the area of a circle|scientific notation|permutations and combinations|"
    "the order of operations|what a derivative is|what an integral is"
    "|complex numbers|fractions with different denominators|Bayes' theorem|the law of large numbers|"
    "proof by contradiction|mathematical induction|vectors|matrices"
    "|exponential growth|the golden ratio|irrational numbers|sine and cosine|set theory|rounding|the "
    "difference between mean and median|binary numbers|modular arithmetic"
    "|how to add fractions|similar triangles|conditional probability|the birthday paradox|expected "
    "value|absolute value|inequalities|functions"
)
_SHAPES = [
    "a circle with a radius of {n} cm",
    "a triangle with a base of {n} cm and a height of {m} cm",
    "a cube with edges of {n} cm",
    "a cylinder with a radius of {n} cm and a height of {m} cm",
    "a rectangle of {n} cm by {m} cm",
    "a sphere with a radius of {n} cm",
    "a right triangle with legs of {n} cm and {m} cm",
    "a cone with a radius of {n} cm and a height of {m} cm",
    "a trapezoid with parallel sides of {n} cm and {m} cm and a height of 5 cm",
    "a regular hexagon with sides of {n} cm",
    "a box of {n} cm by {m} cm by 10 cm",
    "a half circle with a diameter of {n} cm",
]
_ASKS = [
    "Find the area (or surface area) of {s}.",
    "What can you calculate for {s}? Show two results.",
    "Describe how to draw {s}, then compute one quantity of it.",
    "Double every length of {s}. What happens to its size?",
    "Sketch {s} in words and give the formula for its area or volume.",
]
_SAVINGS = words(
    "a holiday|a bicycle|a laptop|a wedding|a piano|driving lessons|a new kitchen|university|a "
    "camera|solar panels|a sailing course|an emergency fund|a dog|a telescope"
)
_DICE = words(
    "two dice show a sum of {n}|a fair coin shows heads {k} times in a row|a card drawn from a deck "
    "is a heart or a king|at least one six appears in {k} rolls"
    "|two cards drawn from a deck are both aces|a random number from 1 to {m} is divisible by {q}|"
    "three coins show exactly two heads|two people in a group of {m} share a birthday"
    "|a random letter of 'MISSISSIPPI' is an S|{k} dice all show the same number|a random day in a "
    "year is in a month starting with J|the product of two dice is even"
    "|the larger of two dice is {p}|a family with {k} children has only girls|a random two-digit "
    "number has equal digits|a spinner with {q} equal parts lands on the same part twice"
)
_COUNTING = words(
    "the letters of '{w}' be arranged|{n} people sit in a row|{n} people sit around a round table|"
    "{k} books be chosen from {m}|a team of {k} be chosen from {m} players"
    "|{k} prizes be given to {m} children, at most one each|a password of {k} digits be made|{n} "
    "different cakes be placed on a shelf|you climb {n} stairs, taking one or two at a time"
    "|{k} scoops be chosen from {m} flavours of ice cream|a captain and a goalkeeper be chosen from "
    "{m} players|{m} coins be split into two piles|{n} flags be hung on a line"
)
_WORDS4 = words("BANANA|LEVEL|PLANET|COFFEE|TIGER|PEPPER|SUMMER|ORANGE|LETTER|MUSIC|GARDEN|ROCKET|BOTTLE|WINDOW")


FAMILIES = (
    Family(
        "arithmetic",
        (
            "What is {a} + {b}?",
            "Calculate {a} - {b}.",
            "{c} x {d} = ?",
            "Work out {c} * {d} + {b} without a calculator.",
            "What is {a} divided by {d}? Give quotient and remainder.",
            "Is {a} + {b} closer to {near} or to {far}?",
            "Add {a}, {b} and {c} step by step.",
            "Estimate {a} * {d} first, then calculate it exactly.",
            "{name} says that {c} times {d} is {wrong}. Is that right?",
        ),
        {"a": range(312, 9800, 37), "b": range(45, 990, 13), "c": range(12, 99, 3), "d": range(6, 29), "name": NAMES},
        _SYSTEM,
        0.25,
        limit=200,
        derive=lambda v: {
            "near": v["a"] // 100 * 100 + v["b"] // 100 * 100,
            "far": v["a"] // 100 * 100 + v["b"] // 100 * 100 + 200,
            "wrong": v["c"] * v["d"] + (0 if v["c"] % 2 else 10),
        },
    ),
    Family(
        "expressions",
        (
            "Evaluate {a} + {b} * ({c} - {d}).",
            "Compute ({a} + {b}) / {d} and round to two decimals.",
            "What is {d}^{e} - {a}?",
            "Calculate {a} - ({b} - {c}) * {d}.",
            "Put brackets into {a} - {b} * {c} + {d} so that the result changes. What are both results?",
            "Simplify: {a} / {d} + {b} / {d}.",
            "Which is larger, {d}^{e} or {a} * {b}?",
        ),
        {"a": range(15, 250, 7), "b": range(3, 60, 4), "c": range(20, 70, 6), "d": range(2, 13), "e": [2, 3, 4]},
        _SYSTEM,
        0.2,
        limit=140,
    ),
    Family(
        "percent",
        (
            "What is {p}% of {a}?",
            "{b} is what percentage of {a}?",
            "Increase {a} by {p}%.",
            "{b} is {p}% of which number?",
            "{name} scored {b} out of {a} points. What percentage is that?",
            "A number grows by {p}% and then shrinks by {p}%. Is it back at {a}?",
        ),
        {
            "p": [3, 5, 8, 12, 15, 18, 20, 24, 35, 45, 60, 75],
            "a": range(120, 980, 20),
            "b": range(15, 118, 3),
            "name": NAMES,
        },
        _SYSTEM,
        0.2,
        limit=120,
    ),
    Family(
        "linear-equation",
        (
            "Solve for x: {left} = {right}",
            "Find x if {left} = {right}, and check your answer.",
            "{left} = {right}. What is x?",
            "{name} solved {left} = {right} and got x = {guess}. Correct?",
        ),
        {"a": range(2, 12), "b": range(-19, 20, 3), "c": range(-4, 9), "x": range(-9, 14), "name": NAMES},
        _SYSTEM,
        0.25,
        limit=130,
        derive=equation,
    ),
    Family(
        "two-unknowns",
        (
            "Solve the system:\n{e1}\n{e2}",
            "Find x and y: {e1} and {e2}.",
            "Where do the lines {e1} and {e2} meet?",
            "The sum of two numbers is {sum} and their difference is {diff}. Find them.",
            "{n} {animals} have {legs} legs in total. How many of each are there?",
        ),
        {
            "x": range(-5, 13),
            "y": range(-6, 10),
            "a": [1, 2, 3, 5],
            "b": [1, 2, 4],
            "c": [1, 3],
            "d": [-1, -2, 5],
            "animals": [
                "chickens and cows",
                "ducks and sheep",
                "birds and cats",
                "pigeons and dogs",
                "geese and goats",
            ],
        },
        _SYSTEM,
        0.2,
        limit=130,
        derive=system_of_two,
    ),
    Family(
        "quadratics",
        (
            "Solve x^2 {b} {c} = 0.",
            "Factor x^2 {b} {c}.",
            "Find the vertex of y = x^2 {b} {c}.",
            "For which x is x^2 {b} {c} negative?",
            "Complete the square: x^2 {b} {c}.",
            "Does y = x^2 {b} {c} cross the x-axis? How often?",
        ),
        {"p": range(-9, 10), "q": range(-8, 11)},
        _SYSTEM,
        0.2,
        limit=110,
        derive=lambda v: (
            None
            if v["p"] + v["q"] == 0 or v["p"] * v["q"] == 0
            else {
                "b": f"{'-' if v['p'] + v['q'] > 0 else '+'} {abs(v['p'] + v['q'])}x",
                "c": f"{'+' if v['p'] * v['q'] > 0 else '-'} {abs(v['p'] * v['q'])}",
            }
        ),
    ),
    Family(
        "fractions",
        (
            "Calculate {f} + {g}.",
            "What is {f} - {g}? Simplify.",
            "Multiply {f} by {g}.",
            "Divide {f} by {g}.",
            "Which is larger, {f} or {g}?",
            "Write {f} as a decimal and as a percentage.",
            "{name} ate {f} of a cake and left the rest. How much is left?",
            "Find a fraction between {f} and {g}.",
        ),
        {"a": range(1, 12), "b": range(3, 16), "c": range(1, 9), "d": range(2, 14), "name": NAMES},
        _SYSTEM,
        0.2,
        limit=140,
        derive=fraction_pair,
    ),
    Family(
        "sequences",
        (
            "What comes next: {terms}, ...?",
            "Find the rule for {terms}, ... and give the tenth term.",
            "The sequence {terms} continues in the same way. Add up its first eight terms.",
            "Is {probe} part of the sequence {terms}, ...?",
            "Write a formula for the n-th term of {terms}, ...",
        ),
        {"kind": ["add", "multiply", "square", "fib", "growing"], "a": range(1, 15), "d": range(2, 12)},
        _SYSTEM,
        0.15,
        limit=130,
        derive=sequence,
    ),
    Family(
        "units",
        (
            "Convert {n} {u.0} to {u.1}.",
            "How many {u.1} are {n} {u.0}?",
            "{name} measured {n} {u.0}. What is that in {u.1}?",
            "Explain how to convert {u.0} to {u.1}, using {n} as an example.",
        ),
        {"n": [3, 4.5, 7, 12, 18, 25, 36, 42, 64, 90, 110, 250], "u": _CONVERT, "name": NAMES},
        _SYSTEM,
        0.2,
        limit=140,
    ),
    Family(
        "theorem",
        (
            "Explain {t}.",
            "Explain {t} to {who}.",
            "Give an example that shows {t} in everyday life.",
            "What is a common mistake with {t}?",
            "Make up one easy and one hard exercise about {t}, with solutions.",
        ),
        {"t": _THEOREMS, "who": AUDIENCES},
        _SYSTEM[::2],
        0.2,
        limit=180,
    ),
    Family(
        "shapes",
        ("{s}",),
        {"s": _ASKS, "shape": _SHAPES, "n": range(3, 15), "m": range(4, 18)},
        _SYSTEM,
        0.2,
        limit=120,
        derive=lambda v: {
            "s": str(v["s"]).replace("{s}", str(v["shape"])).replace("{n}", str(v["n"])).replace("{m}", str(v["m"]))
        },
    ),
    Family(
        "interest",
        (
            "{name} saves ${m} a month for {goal}. How much is it after {y} years without interest?",
            "${p} grows at {r}% per year. How much is it after {y} years with compound interest?",
            "How long does it take to save ${p} for {goal} at ${m} a month?",
            ("{name} borrows ${p} for {goal} at {r}% simple interest per year. How much is due after {y} years?"),
            "What is better for {goal}: ${p} today, or ${m} a month for {y} years?",
        ),
        {
            "name": NAMES,
            "goal": _SAVINGS,
            "m": range(40, 400, 30),
            "p": range(800, 9000, 400),
            "r": [1.5, 2, 3, 4, 5, 6.5],
            "y": range(2, 11),
        },
        _SYSTEM,
        0.2,
        limit=130,
    ),
    Family(
        "chance",
        (
            "What is the probability that {event}?",
            "How likely is it that {event}? Explain.",
            "{name} bets that {event}. Is that a good bet at even odds?",
            "How could I check by experiment how often {event}?",
            "Estimate first, then calculate the chance that {event}.",
        ),
        {
            "event": _DICE,
            "name": NAMES,
            "n": range(3, 12),
            "k": [2, 3, 4, 5],
            "m": range(12, 41),
            "q": range(3, 9),
            "p": range(2, 7),
        },
        _SYSTEM,
        0.2,
        limit=110,
        derive=fill_in("event"),
    ),
    Family(
        "counting",
        (
            "In how many ways can {case}?",
            "Explain step by step: in how many ways can {case}?",
            "In how many ways can {case}? Is it more than 100?",
        ),
        {"case": _COUNTING, "w": _WORDS4, "n": range(4, 10), "k": [2, 3, 4], "m": range(6, 15)},
        _SYSTEM,
        0.2,
        limit=110,
        derive=fill_in("case"),
    ),
    Family(
        "number-facts",
        (
            "Is {n} a prime number?",
            "Find the prime factors of {n}.",
            "What is the greatest common divisor of {n} and {m}?",
            "What is the least common multiple of {k} and {d}?",
            "Write {n} in binary.",
            "List all divisors of {k}.",
            "What is the remainder when {n} is divided by {d}?",
            "Round {n} to the nearest ten and the nearest hundred.",
            "Write {n} in words, then in Roman numerals.",
            "What is special about the number {k}?",
        ),
        {"n": range(101, 1900, 17), "m": range(84, 900, 12), "k": range(24, 180, 3), "d": range(7, 26)},
        _SYSTEM,
        0.2,
        limit=140,
    ),
)
