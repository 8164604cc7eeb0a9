"""English code families."""

from __future__ import annotations

from . import en_code_data, en_code_more
from .en_words import words
from .family import Family
from .snippets import BROKEN, CODE

_SYSTEM = words(
    "You are a helpful coding assistant.|You are a senior programmer. Answer with code first, then a "
    "short explanation."
    "|You help beginners learn to program. Be patient and clear.|Reply with code only, without "
    "comments."
)
_TEXT_TASKS = words(
    "counts the vowels in a string|checks whether a word is a palindrome|reverses the words in a "
    "sentence|removes all punctuation from a text"
    "|finds the longest word in a sentence|counts how often each character appears|checks whether "
    "two words are anagrams"
    "|converts snake_case to camelCase|replaces every second letter with a star|capitalises the "
    "first letter of each word"
    "|encodes a message with a Caesar cipher|extracts all email addresses from a text|removes extra "
    "spaces from a string"
    "|compresses 'aaabb' to 'a3b2'|checks whether a password is strong|splits a full name into first "
    "and last name"
    "|finds the first character that does not repeat|turns a title into a URL slug|counts lines, "
    "words and characters"
    "|validates a phone number|masks all but the last four digits of a card number|converts Roman "
    "numerals to integers"
)
_LIST_TASKS = words(
    "removes duplicates from a list and keeps the order|finds the second largest number in a list|"
    "merges two sorted lists"
    "|rotates a list by k positions|splits a list into chunks of equal size|flattens a nested list|"
    "finds the missing number from 1 to n"
    "|groups words by their first letter|finds all pairs that add up to a target|sorts a list of "
    "people by age and then by name"
    "|returns the most common element|moves all zeros to the end|computes a running average|finds "
    "the intersection of two lists"
    "|finds the longest increasing run|counts how many numbers are above average|shuffles a list "
    "without using a library"
    "|checks whether a list is sorted|transposes a matrix|inverts a dictionary|finds the median of a "
    "list|partitions numbers into even and odd"
)
_NUMBER_TASKS = words(
    "checks whether a number is prime|computes the greatest common divisor of two numbers|returns "
    "the first n Fibonacci numbers"
    "|converts a number to binary|sums the digits of an integer|finds all divisors of a number|"
    "computes the factorial of n"
    "|converts Celsius to Fahrenheit|computes compound interest|checks whether a year is a leap year|"
    "converts seconds to hours and minutes"
    "|computes the distance between two points|simulates rolling two dice|finds all perfect numbers "
    "below a limit"
    "|rounds a price to the nearest five cents|checks whether a number is a perfect square|solves a "
    "quadratic equation"
    "|estimates pi with random points|prints Pascal's triangle|computes the least common multiple|"
    "counts the days between two dates"
    "|splits a bill among n people with a tip"
)
_LANGS = ["Python", "JavaScript", "Java", "Go", "C", "TypeScript", "Ruby", "Rust", "PHP", "C++"]
_EXTRAS = words(
    "Include a docstring and an example call.|Handle empty input.|Do not use any library.|Add type "
    "hints or types where the language has them."
    "|Explain how fast it is.|Write it as short as you can.|Add two or three tests.|Explain each "
    "line.|Raise an error for bad input."
)
_CONCEPTS = words(
    "recursion|closures|list comprehensions|decorators|generators|inheritance|polymorphism|hash "
    "tables|linked lists|binary search|big O notation"
    "|pointers|garbage collection|promises|async and await|callbacks|REST APIs|unit tests|version "
    "control|regular expressions|race conditions"
    "|deadlocks|environment variables|dependency injection|immutability|type inference|stack and "
    "heap memory|exceptions|interfaces|JSON"
    "|SQL joins|database indexes|transactions|memoisation|dynamic programming|breadth-first search|"
    "context managers|lambda functions"
    "|event loops|caching|code review|continuous integration|virtual environments|semantic "
    "versioning|mutexes|the DOM|CSS specificity"
)
_PROGRAMS = words(
    "a to-do list in the terminal|a number guessing game|a simple calculator|a tic-tac-toe game|a "
    "password generator|a countdown timer"
    "|a hangman game|a unit converter|an expense tracker that saves to a CSV file|a quiz that reads "
    "questions from JSON|a word counter for text files"
    "|a temperature logger|a dice simulator|a contact book|a rock-paper-scissors game|a file renamer|"
    "a Markdown table builder|a bank account simulation"
    "|a shopping cart|a flash card trainer|a maze solver|a text adventure with three rooms|a habit "
    "tracker|a random team picker"
)
_CLASSES = words(
    "a bank account|a parking garage|a library with books and members|a playlist|a deck of cards|a "
    "chess board|a thermostat|a vending machine"
    "|a queue with a maximum size|a stopwatch|a matrix|a fraction|a student with grades|a shopping "
    "basket|an elevator|a graph with weighted edges"
    "|a recipe with ingredients|a calendar event|an inventory|a binary tree|a least-recently-used "
    "cache|a polynomial|a robot on a grid|a ticket counter"
)


def _function(name: str, tasks: list[str]) -> Family:
    return Family(
        name,
        (
            "Write a {lang} function that {task}.",
            "Write a {lang} function that {task}. {extra}",
            "How do I write a function in {lang} that {task}?",
            "I need a function that {task}. Use {lang}. {extra}",
            "Show me two different ways to write a {lang} function that {task}.",
        ),
        {"lang": ["Python", "Python", "JavaScript", *_LANGS], "task": tasks, "extra": _EXTRAS},
        _SYSTEM,
        0.2,
        limit=220,
    )


FAMILIES = (
    _function("text-function", _TEXT_TASKS),
    _function("list-function", _LIST_TASKS),
    _function("number-function", _NUMBER_TASKS),
    Family(
        "concept",
        (
            "Explain {concept} with a short {lang} example.",
            "What does a beginner need to know about {concept}?",
            "Explain {concept} in two sentences.",
            "When should I care about {concept} in a real project?",
            "What are common mistakes with {concept}?",
            "I have an interview tomorrow. Ask me about {concept} and give me the ideal answer.",
        ),
        {"concept": _CONCEPTS, "lang": ["Python", "JavaScript", "pseudocode", "Java"]},
        _SYSTEM,
        0.2,
    ),
    Family(
        "explain-code",
        (
            "What does this code do?\n\n{c.code}",
            "Explain this {c.name} code line by line.\n{c.code}",
            "{c.code}\nExplain this to someone who has never programmed.",
            "Give this code better names and a comment at the top.\n\n{c.code}",
            "In one sentence, what is the purpose of this?\n{c.code}",
        ),
        {"c": CODE},
        _SYSTEM[:3],
        0.2,
    ),
    Family(
        "port-code",
        ("Rewrite this {c.name} code in {lang}.\n\n{c.code}", "What would this look like in {lang}?\n{c.code}"),
        {
            "c": [c for c in CODE if c["kind"] not in ("html", "css", "sql", "bash")],
            "lang": ["Ruby", "Kotlin", "PHP", "TypeScript", "C#", "Swift", "Perl", "Lua"],
        },
        limit=160,
    ),
    Family(
        "test-code",
        (
            "Write unit tests for this code.\n\n{c.code}",
            "Which edge cases should I test here? List them.\n{c.code}",
            "Review this code. Is there anything you would change?\n\n{c.code}",
            "How could I make this faster or clearer?\n{c.code}",
            "Write documentation for this code.\n\n{c.code}",
        ),
        {"c": CODE},
        _SYSTEM[:3],
        0.1,
    ),
    Family(
        "debug",
        (
            "Why do I get this error?\n\n{b.code}\n\nOutput: {b.error}",
            "Fix this code.\n{b.code}",
            "My {b.name} code does not work as I expect. It gives:\n{b.error}\n\nHere is the code:\n{b.code}",
            "Find the bug and explain it in simple words.\n\n{b.code}",
            "{b.code}\n\n{b.error}\n\nWhat is wrong here?",
            'I am new to {b.name}. What does "{b.error}" mean, and how do I avoid it?',
        ),
        {"b": BROKEN},
        _SYSTEM[:3],
        0.2,
    ),
    Family(
        "small-program",
        (
            "Write {program} in {lang}.",
            "How would you structure {program}? Describe the parts before any code.",
            "Help me build {program} in {lang}, step by step. Start with step one.",
            "I want to write {program} as my first project. Which features should I start with?",
            "Write {program} in {lang}. {extra}",
        ),
        {"program": _PROGRAMS, "lang": ["Python", "JavaScript", "Java", "C", "Go"], "extra": _EXTRAS[:5]},
        _SYSTEM,
        0.2,
        limit=200,
    ),
    Family(
        "class-design",
        (
            "Write a {lang} class for {thing}.",
            "Design a class that models {thing}. Which methods and attributes should it have?",
            "Write a {lang} class for {thing} with at least {n} methods and show how to use it.",
            "Write an interface for {thing} in {lang} and one implementation.",
        ),
        {"thing": _CLASSES, "lang": ["Python", "Java", "TypeScript", "C++", "Kotlin"], "n": ["two", "three", "four"]},
        _SYSTEM,
        0.15,
        limit=180,
    ),
    *en_code_more.FAMILIES,
    *en_code_data.FAMILIES,
)
